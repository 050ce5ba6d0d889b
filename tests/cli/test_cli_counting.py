"""The figures of a report against counts that are worked out by hand, for runs of a few requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import meter
from asynccache.cli.engine import StandInEngine, device_faults
from asynccache.cli.main import main
from asynccache.cli.service import Server
from asynccache.cli.workloads import RunRequest
from asynccache.memory.host_copies import Faults
from asynccache.testing.faulty_backend import DELAY
from tests.cli.trace_kit import ALL, BY_BLOCK

BLOCK = 512


def trace(path: Path, *requests: tuple[int, int, list[int]]) -> str:
    """(timestamp, tokens beyond whole blocks, whole blocks) each; what is beyond is nobody else's."""
    rows = [{"timestamp": at, "input_length": len(blocks) * BLOCK + rest, "output_length": 20,
             "hash_ids": blocks + ([1_000_000 + number] if rest else [])}
            for number, (at, rest, blocks) in enumerate(requests)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def replay(tmp_path: Path, *requests: tuple[int, int, list[int]], more: str = "") -> dict[str, Any]:
    report = tmp_path / "report.json"
    arguments = ["replay", trace(tmp_path / "trace.jsonl", *requests), "--concurrency", "1", "--quiet", "--json",
                 str(report), *BY_BLOCK, "--device-tokens", "65536", "--host-tokens", "8388608",
                 *more.split()]  # fmt: skip
    assert main(arguments) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def stress(tmp_path: Path, more: str) -> dict[str, Any]:
    report = tmp_path / "report.json"
    arguments = ["stress", "--rate", "0", "--quiet", "--json", str(report), "--bytes-per-token", "64", "--mamba-bytes",
                 "1024", *ALL, *more.split()]  # fmt: skip
    assert main(arguments) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    return found


SHARED = [1, 2, 3, 4]
FORKS = [(0, 7, [*SHARED, 10, 11]), (0, 9, [*SHARED, 20]), (0, 0, [*SHARED, 30, 31, 32])]


def test_a_full_block_counts_where_all_before_it_were_hits_and_a_partial_last_one_never(tmp_path: Path) -> None:
    found = replay(tmp_path, *FORKS, (0, 3, [*SHARED, 20, 40]), (0, 0, [2, 3]), more="--host-tokens none")
    assert found["blocks"] == {"total": 6 + 5 + 7 + 6 + 2, "hit": 4 + 4 + 5, "shared": 4 + 4 + 5}
    assert found["tokens"]["total"] == 26 * BLOCK + 7 + 9 + 3
    assert found["tokens"]["hit"] == {"device": 13 * BLOCK, "host": 0, "storage": 0}
    assert found["hit_ratio"] == pytest.approx(13 * BLOCK / found["tokens"]["total"])
    assert found["verify"]["pages"] == 13


def test_a_prompt_that_is_a_hit_as_a_whole_still_computes_its_last_block(tmp_path: Path) -> None:
    found = replay(tmp_path, (0, 0, [1, 2, 3]), (0, 0, [1, 2, 3]), more="--host-tokens none")
    assert found["blocks"]["hit"] == 2


def test_states_are_taken_at_the_prompts_end_and_where_full_alone_matched(tmp_path: Path) -> None:
    """The second request finds FULL of the shared blocks and no state; it leaves one there, so the third one hits."""
    found = replay(tmp_path, *FORKS, more="--components full,mamba --host-tokens none --mamba-bytes 512")
    assert found["blocks"]["hit"] == 4
    longer = [(0, 0, [1, 2, 3]), (0, 5, [1, 2, 3, 4, 5]), (0, 5, [1, 2, 3, 4, 5, 6])]
    found = replay(tmp_path, *longer, more="--components full,mamba --host-tokens none --mamba-bytes 512")
    assert found["blocks"]["hit"] == 3 + 5


def test_hits_count_at_the_nearest_tier_that_held_them_on_arrival(tmp_path: Path) -> None:
    """L1 has 16 pages, and another prompt of 14 comes in between: then the first one's are on the host alone."""
    small = "--device-tokens 8192 --host-tokens 65536 --decode-tokens 0"
    first, other = (0, 1, [1, 2, 3, 4, 5, 6]), (0, 1, list(range(50, 64)))
    found = replay(tmp_path, first, other, first, more=small)
    assert found["tokens"]["hit"] == {"device": 0, "host": 6 * BLOCK, "storage": 0}
    assert found["stages"]["load_back"]["pages"] == 6
    store = f"{small} --storage file:{tmp_path}/kv?capacity=64MiB"
    replay(tmp_path, first, more=store)
    found = replay(tmp_path, first, first, other, first, more=store)
    assert found["tokens"]["hit"] == {"device": 6 * BLOCK, "host": 6 * BLOCK, "storage": 6 * BLOCK}
    assert found["stages"]["prefetch"]["pages"] == 6


def test_stages_count_pages_and_bytes(tmp_path: Path) -> None:
    pools = "--storage memory: --bytes-per-token 24 --layers 3"
    found = replay(tmp_path, (0, 1, [1, 2, 3]), (0, 1, [1, 4]), more=pools)
    for name in ("backup_host", "backup_storage"):
        stage = found["stages"][name]
        assert (stage["pages"], stage["bytes"], stage["errors"]) == (4, 4 * BLOCK * 24, 0), name
        assert stage["ops"] >= 2
        assert 0 < stage["latency_ms"]["p50"] <= stage["latency_ms"]["max"]


@pytest.mark.parametrize("slowdown", [1.0, 2.5])
def test_time_to_first_token_is_the_wait_and_the_prefill_of_what_was_not_cached(
    slowdown: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine prefill is slow with and without the cache."""
    monkeypatch.setattr(StandInEngine, "slowdown", slowdown)
    requests = [(0, 1, [1, 2, 3, 4]), (0, 1, [1, 2, 3, 4])]
    found = replay(tmp_path, *requests, more="--host-tokens none --prefill-tokens-per-s 2049")
    assert found["prefill_slowdown"] == slowdown
    assert found["ttft_without_cache_mean_ms"] == pytest.approx(1000 * slowdown)
    computed = (2049 + 1) / 2 / 2049 * 1000 * slowdown
    assert found["ttft_mean_ms"] == pytest.approx(computed + found["wait_mean_ms"], abs=0.01)


def test_a_replay_by_the_clock_takes_its_time(tmp_path: Path) -> None:
    found = replay(tmp_path, (0, 1, [1]), (2000, 1, [2]), (4000, 1, [3]), more="--speed 10 --host-tokens none")
    assert 0.4 <= found["elapsed_s"] < 5
    assert replay(tmp_path, (0, 1, [1]), (60_000, 1, [2]), more="--host-tokens none")["elapsed_s"] < 30


def test_the_longest_prompt_that_fits_is_served_and_one_page_less_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = (0, 500, [1, 2, 3])
    room = "--host-tokens none --decode-tokens 12 --device-tokens"
    assert replay(tmp_path, request, more=f"{room} 2048")["served"] == 1
    assert main(["replay", str(tmp_path / "trace.jsonl"), "--quiet", *f"{room} 1536".split()]) == 2
    said = "request 1 of the trace has 2036 prompt tokens and decodes 12: at least 2048 are needed"
    assert f"--device-tokens=1536: {said}" in capsys.readouterr().err


def test_a_shorter_prompt_whose_output_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": length, "output_length": output, "hash_ids": [1, 2, number]}
            for number, (length, output) in enumerate([(1535, 1), (1500, 500)], start=3)]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    room = "--host-tokens none --decode-tokens 500 --device-tokens"
    assert main(["replay", str(path), "--quiet", *f"{room} 2048".split()]) == 0
    assert main(["replay", str(path), "--quiet", *f"{room} 1536".split()]) == 2
    said = "request 2 of the trace has 1500 prompt tokens and decodes 500: at least "
    assert f"--device-tokens=1536: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("speed", ["0", "1000"])
def test_pages_age_by_the_time_of_the_trace_at_any_speed(speed: str, tmp_path: Path) -> None:
    """Twenty prompts come again after 1,000 s. The replay of them takes a second or two."""
    again = [(at + i, 1, [i + 1]) for at in (0, 1_000_000) for i in range(20)]
    found = replay(tmp_path, *again, more=f"--speed {speed} --eviction p2c")
    (once,) = [curve for curve in found["learned"]["curves"] if curve["name"] == "used once"]
    edges = found["learned"]["edges_s"]
    ages = [edges[k] for k, blocks in enumerate(once["used"]) if blocks]
    assert ages == [max(edge for edge in edges if edge <= 1000)]


@pytest.mark.parametrize("more", ["", "--page-size 16", "--storage memory: --page-size 16", "--speed 100"])
def test_requests_that_come_at_once_hit_as_much_as_one_after_another(tmp_path: Path, more: str) -> None:
    """A prompt is looked up when all earlier ones are computed, as a scheduler does it; so the hits are the trace's."""
    alike = [(0, 7, [*SHARED, *range(100 * number, 100 * number + number)]) for number in range(12)]
    found = replay(tmp_path, *alike, more=f"--concurrency 12 --end-hints 0.5 {more}")
    assert found["blocks"]["hit"] == found["blocks"]["shared"] == 11 * len(SHARED)
    assert found["ceiling"] == pytest.approx(found["hit_ratio"], abs=0.03)


def test_limit_takes_the_first_requests(tmp_path: Path) -> None:
    found = replay(tmp_path, (0, 1, [1]), (0, 1, [1, 2]), (0, 1, [3]), more="--limit 2 --host-tokens none")
    assert (found["requests"], found["blocks"]["total"], found["blocks"]["hit"]) == (2, 3, 1)


def test_a_conversation_hits_its_own_answers_only_where_they_are_kept(tmp_path: Path) -> None:
    room = "--workload chat --components full --requests 60 --concurrency 1 --device-tokens 262144 --host-tokens none"
    kept, not_kept = (stress(tmp_path, f"{room} --storage none {flag}")
                      for flag in ("--insert-outputs", "--no-insert-outputs"))
    assert kept["tokens"]["total"] == not_kept["tokens"]["total"]
    assert kept["tokens"]["hit"]["device"] > not_kept["tokens"]["hit"]["device"] + 1000


@pytest.mark.parametrize("host", ["none", "8192"])
def test_what_hits_cost_the_host_is_told_beside_them(host: str, tmp_path: Path) -> None:
    room = f"--device-tokens 8192 --host-tokens {host} --storage none --concurrency 4"
    found = stress(tmp_path, f"--requests 60 --components full --decode-tokens 16 {room}")
    if host == "none":
        assert "per_hit" not in found
        return
    hit, stages = sum(found["tokens"]["hit"].values()), found["stages"]
    assert found["per_hit"]["written_to_host"] == pytest.approx(stages["backup_host"]["tokens"] / hit, abs=1e-3)
    assert found["per_hit"]["loaded_from_host"] == pytest.approx(stages["load_back"]["tokens"] / hit, abs=1e-3)


@pytest.mark.parametrize(("flags", "verified"), [("--verify", True), ("", True), ("--no-verify", False)])
def test_pages_are_verified_unless_that_is_switched_off(flags: str, verified: bool, tmp_path: Path) -> None:
    found = stress(tmp_path, f"--requests 20 --storage none {flags}")
    assert (found["verify"]["pages"] > 0) is verified
    assert (found["served"], found["verify"]["mismatches"]) == (20, 0)


def test_after_its_duration_a_run_takes_no_more_requests(tmp_path: Path) -> None:
    found = stress(tmp_path, "--duration 0.5 --concurrency 4")
    assert 0.5 <= found["elapsed_s"] < 20
    assert found["served"] == found["requests"] > 0


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.5, 20, 65), (1.0, 50, 100)])
@pytest.mark.slow(1)
def test_the_cancel_rate_is_the_share_of_requests_that_are_cancelled(
    rate: float, low: int, high: int, tmp_path: Path
) -> None:
    """A place that is drawn may lie behind the end of a short request, so fewer are cancelled than are drawn."""
    found = stress(tmp_path, f"--requests 100 --cancel-rate {rate} --seed 2")
    assert low <= found["cancelled"] <= high
    assert found["served"] + found["cancelled"] == 100


def test_faults_come_in_the_shares_that_help_tells() -> None:
    assert device_faults(0.4, 9) == Faults(seed=9, delayed=0.2, failing=0.1, delay=(0.001, 0.05))
    assert DELAY == (0.001, 0.05)


@pytest.mark.slow(2)
def test_faults_show_in_the_report(tmp_path: Path) -> None:
    found = stress(tmp_path, "--requests 120 --faults 0.4 --device-tokens 12288 --host-tokens 24576")
    assert found["stages"]["backup_host"]["errors"] > 0
    assert found["stages"]["backup_storage"]["errors"] > 0
    assert found["verify"]["mismatches"] == 0


def test_loop_lag_is_the_lateness_of_five_milliseconds() -> None:
    assert meter.TICK == 0.005


@pytest.mark.parametrize("places", [1, 3])
def test_so_many_requests_run_at_the_same_time_and_no_more(
    places: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, running, most = Server.serve, 0, 0

    async def counted(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await serve(self, request, places)
        finally:
            running -= 1

    monkeypatch.setattr(Server, "serve", counted)
    stress(tmp_path, f"--requests 30 --concurrency {places}")
    assert most == places
