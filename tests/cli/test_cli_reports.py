"""The figures of a report against counts that are worked out by hand, and how they are shown."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import asynccache.cli.meter as meter_module
from asynccache import AsyncCache, CacheConfig, Full
from asynccache.cli import output
from asynccache.cli import report as samples
from asynccache.cli.display import Screen, counts, line, panel, summary
from asynccache.cli.engine import StandInEngine, device_faults
from asynccache.cli.main import main
from asynccache.cli.meter import TICK, Meter, Samples, Spread, peak_rss, spread
from asynccache.cli.options import RunSettings
from asynccache.cli.report import Sampler, Tally, UncachedEngine, thinned
from asynccache.cli.service import Server
from asynccache.cli.session import execute
from asynccache.cli.workloads import RunRequest
from asynccache.errors import ConfigError
from asynccache.memory.host_copies import Faults
from asynccache.runtime.lookups import LookupStats
from asynccache.testing.faulty_backend import DELAY
from tests.cli.trace_kit import ALL, BY_BLOCK, Ran, write_trace
from tests.processes import Command

# The figures of a report against counts that are worked out by hand, for runs of a few requests.

BLOCK = 512
Requests = Sequence[tuple[int, int, list[int]]]
"""(timestamp, tokens beyond whole blocks, whole blocks) each; what is beyond is nobody else's."""


@pytest.fixture
def replay(tmp_path: Path, ran: Ran) -> Ran:
    """Replays such requests, one at a time."""

    def done(requests: Requests, more: str = "") -> dict[str, Any]:
        trace = write_trace(tmp_path / "trace.jsonl", (
            {"timestamp": at, "input_length": len(blocks) * BLOCK + rest, "output_length": 20,
             "hash_ids": blocks + ([1_000_000 + number] if rest else [])}
            for number, (at, rest, blocks) in enumerate(requests)))  # fmt: skip
        return ran(f"replay {trace} --concurrency 1 {' '.join(BY_BLOCK)} --device-tokens 65536 --host-tokens 8388608 "
                   f"{more}")  # fmt: skip

    return done


STRESS = f"stress --rate 0 --bytes-per-token 64 --mamba-bytes 1024 {' '.join(ALL)} "
SHARED = [1, 2, 3, 4]
FORKS = [(0, 7, [*SHARED, 10, 11]), (0, 9, [*SHARED, 20]), (0, 0, [*SHARED, 30, 31, 32])]
DEVICE = "--host-tokens none "
STATES = DEVICE + "--components full,mamba --mamba-bytes 512"


def test_a_full_block_counts_where_all_before_it_were_hits_and_a_partial_last_one_never(replay: Ran) -> None:
    found = replay([*FORKS, (0, 3, [*SHARED, 20, 40]), (0, 0, [2, 3])], DEVICE)
    assert found["blocks"] == {"total": 6 + 5 + 7 + 6 + 2, "hit": 4 + 4 + 5, "shared": 4 + 4 + 5}
    assert found["tokens"]["total"] == 26 * BLOCK + 7 + 9 + 3
    assert found["tokens"]["hit"] == {"device": 13 * BLOCK, "host": 0, "storage": 0}
    assert found["hit_ratio"] == pytest.approx(13 * BLOCK / found["tokens"]["total"])
    assert found["verify"]["pages"] == 13


@pytest.mark.parametrize(("requests", "more", "hit"), [
    ([(0, 0, [1, 2, 3]), (0, 0, [1, 2, 3])], DEVICE, 2),                  # the last block of a prompt is computed
    (FORKS, STATES, 4),    # the second finds FULL of the shared blocks and no state; it leaves one, so the third hits
    ([(0, 0, [1, 2, 3]), (0, 5, [1, 2, 3, 4, 5]), (0, 5, [1, 2, 3, 4, 5, 6])], STATES, 3 + 5),   # and at prompts' ends
    ([(0, 1, [1]), (0, 1, [1, 2]), (0, 1, [3])], DEVICE + "--limit 2", 1),
])  # fmt: skip
def test_so_many_blocks_hit(requests: Requests, more: str, hit: int, replay: Ran) -> None:
    found = replay(requests, more)
    assert (found["blocks"]["hit"], found["requests"]) == (hit, 2 if "limit" in more else len(requests))


def test_hits_count_at_the_nearest_tier_that_held_them_on_arrival(replay: Ran) -> None:
    """L1 has 16 pages, and another prompt of 14 comes in between: then the first one's are on the host alone."""
    small = "--device-tokens 8192 --host-tokens 65536 --decode-tokens 0"
    first, other = (0, 1, [1, 2, 3, 4, 5, 6]), (0, 1, list(range(50, 64)))
    found = replay([first, other, first], small)
    assert found["tokens"]["hit"] == {"device": 0, "host": 6 * BLOCK, "storage": 0}
    assert found["stages"]["load_back"]["pages"] == 6
    store = f"{small} --storage file:FOLDER/kv?capacity=64MiB"
    replay([first], store)
    found = replay([first, first, other, first], store)
    assert found["tokens"]["hit"] == {"device": 6 * BLOCK, "host": 6 * BLOCK, "storage": 6 * BLOCK}
    assert found["stages"]["prefetch"]["pages"] == 6


def test_stages_count_pages_and_bytes(replay: Ran) -> None:
    found = replay([(0, 1, [1, 2, 3]), (0, 1, [1, 4])], "--storage memory: --bytes-per-token 24 --layers 3")
    for name in ("backup_host", "backup_storage"):
        stage = found["stages"][name]
        assert (stage["pages"], stage["bytes"], stage["errors"]) == (4, 4 * BLOCK * 24, 0), name
        assert stage["ops"] >= 2
        assert 0 < stage["latency_ms"]["p50"] <= stage["latency_ms"]["max"]


@pytest.mark.parametrize("slowdown", [1.0, 2.5])
def test_time_to_first_token_is_the_wait_and_the_prefill_of_what_was_not_cached(
    slowdown: float, replay: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine prefill is slow with and without the cache."""
    monkeypatch.setattr(StandInEngine, "slowdown", slowdown)
    found = replay([(0, 1, SHARED), (0, 1, SHARED)], DEVICE + "--prefill-tokens-per-s 2049")
    assert found["prefill_slowdown"] == slowdown
    assert found["ttft_without_cache_mean_ms"] == pytest.approx(1000 * slowdown)
    computed = (2049 + 1) / 2 / 2049 * 1000 * slowdown
    assert found["ttft_mean_ms"] == pytest.approx(computed + found["wait_mean_ms"], abs=0.01)


@pytest.mark.parametrize(("prompts", "needs"), [
    ([(2036, 20)], "request 1 of the trace has 2036 prompt tokens and decodes 12: at least 2048 are needed"),
    ([(1535, 1), (1500, 500)], "request 2 of the trace has 1500 prompt tokens and decodes 500: at least "),
])  # fmt: skip
def test_a_prompt_that_fits_with_its_output_is_served_and_with_one_page_less_refused(
    prompts: list[tuple[int, int]], needs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (
        {"timestamp": 0, "input_length": length, "output_length": output,
         "hash_ids": [*range(-(-length // BLOCK) - 1), 9 + number]} for number, (length, output) in enumerate(prompts)
    ))  # fmt: skip
    decodes = "12" if len(prompts) == 1 else "500"
    words = ["replay", str(trace), "--quiet", "--page-size", "512", "--host-tokens", "none", "--decode-tokens", decodes]
    assert [main([*words, "--device-tokens", room]) for room in ("2048", "1536")] == [0, 2]
    assert f"--device-tokens=1536: {needs}" in capsys.readouterr().err


@pytest.mark.parametrize("speed", ["0", "1000"])
def test_pages_age_by_the_time_of_the_trace_at_any_speed(speed: str, replay: Ran) -> None:
    """Twenty prompts come again after 1,000 s. The replay of them takes a second or two."""
    found = replay([(at + i, 1, [i + 1]) for at in (0, 1_000_000) for i in range(20)],
                   f"--speed {speed} --eviction p2c")
    (once,) = [curve for curve in found["learned"]["curves"] if curve["name"] == "used once"]
    edges = found["learned"]["edges_s"]
    ages = [edges[k] for k, blocks in enumerate(once["used"]) if blocks]
    assert ages == [max(edge for edge in edges if edge <= 1000)]


@pytest.mark.parametrize("more", ["", "--page-size 16", "--storage memory: --page-size 16", "--speed 100"])
def test_requests_that_come_at_once_hit_as_much_as_one_after_another(more: str, replay: Ran) -> None:
    """A prompt is looked up when all earlier ones are computed, as a scheduler does it; so the hits are the trace's."""
    alike = [(0, 7, [*SHARED, *range(100 * number, 100 * number + number)]) for number in range(12)]
    found = replay(alike, f"--concurrency 12 --end-hints 0.5 {more}")
    assert found["blocks"]["hit"] == found["blocks"]["shared"] == 11 * len(SHARED)
    assert found["ceiling"] == pytest.approx(found["hit_ratio"], abs=0.03)


def test_a_conversation_hits_its_own_answers_only_where_they_are_kept(ran: Ran) -> None:
    room = "--workload chat --components full --requests 60 --concurrency 1 --device-tokens 262144 --host-tokens none"
    kept, not_kept = (ran(f"{STRESS}{room} --storage none {flag}")["tokens"]
                      for flag in ("--insert-outputs", "--no-insert-outputs"))  # fmt: skip
    assert kept["total"] == not_kept["total"]
    assert kept["hit"]["device"] > not_kept["hit"]["device"] + 1000


@pytest.mark.parametrize("host", ["none", "8192"])
def test_what_hits_cost_the_host_is_told_beside_them(host: str, ran: Ran) -> None:
    found = ran(f"{STRESS}--requests 60 --components full --decode-tokens 16 --device-tokens 8192 "
                f"--host-tokens {host} --storage none --concurrency 4")
    if host == "none":
        assert "per_hit" not in found
        return
    hit = sum(found["tokens"]["hit"].values())
    cost = {"written_to_host": "backup_host", "loaded_from_host": "load_back"}
    assert found["per_hit"] == pytest.approx({k: found["stages"][v]["tokens"] / hit for k, v in cost.items()}, abs=1e-3)


@pytest.mark.parametrize(("flags", "verified"), [("--verify", True), ("", True), ("--no-verify", False)])
def test_pages_are_verified_unless_that_is_switched_off(flags: str, verified: bool, ran: Ran) -> None:
    found = ran(f"{STRESS}--requests 20 --storage none {flags}")
    assert (found["served"], found["verify"]["pages"] > 0) == (20, verified)


def test_after_its_duration_a_run_takes_no_more_requests(ran: Ran) -> None:
    found = ran(f"{STRESS}--duration 0.5 --concurrency 4")
    assert 0.5 <= found["elapsed_s"] < 20
    assert found["served"] == found["requests"] > 0


@pytest.mark.slow(2)
@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.5, 20, 65), (1.0, 50, 100)])
def test_the_cancel_rate_is_the_share_of_requests_that_are_cancelled(
    rate: float, low: int, high: int, ran: Ran
) -> None:
    """A place that is drawn may lie behind the end of a short request, so fewer are cancelled than are drawn."""
    found = ran(f"{STRESS}--requests 100 --cancel-rate {rate} --seed 2")
    assert low <= found["cancelled"] <= high
    assert found["served"] + found["cancelled"] == 100


@pytest.mark.slow(2)
def test_faults_come_in_the_shares_that_help_tells_and_show_in_the_report(ran: Ran) -> None:
    assert device_faults(0.4, 9) == Faults(seed=9, delayed=0.2, failing=0.1, delay=(0.001, 0.05))
    assert (DELAY, TICK) == ((0.001, 0.05), 0.005)
    found = ran(f"{STRESS}--requests 120 --faults 0.4 --device-tokens 12288 --host-tokens 24576")
    assert min(found["stages"][stage]["errors"] for stage in ("backup_host", "backup_storage")) > 0


@pytest.mark.parametrize("places", [1, 3])
def test_so_many_requests_run_at_the_same_time_and_no_more(
    places: int, ran: Ran, monkeypatch: pytest.MonkeyPatch
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
    ran(f"{STRESS}--requests 30 --concurrency {places}")
    assert most == places


def test_json_on_standard_output_is_nothing_but_json_and_has_every_key(command: Command) -> None:
    shown = command(*STRESS.split(), "--requests", "5", "--json", "-")
    found = json.loads(shown.stdout)
    assert found["served"] == 5
    assert shown.stderr.startswith("stress OK: 5 requests")
    assert report().keys() - found.keys() == {"blocks", "block_size", "format"}, "of a replay"
    assert report()["leaks"].keys() == found["leaks"].keys()
    stage = report()["stages"]["prefetch"].keys()
    assert all(stage <= one.keys() for one in found["stages"].values())


# Percentiles and samples, and a meter of the loop's lateness that goes by the clock.


def test_percentiles() -> None:
    assert spread([]) == Spread(0, 0, 0, 0)
    assert spread([3.0]) == Spread(3, 3, 3, 3)
    assert spread(range(1000), 2.0) == Spread(1000, 1980, 1998, 1998)


def test_samples_are_exact_until_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Samples, "LIMIT", 100)
    few = Samples(range(100))
    assert (list(few), few.mean(), few.spread(2.0)) == (list(range(100)), 49.5, spread(range(100), 2.0))
    many = Samples(float(i) for i in range(10_007))
    assert 50 <= len(many) <= 100
    assert (many.count, many.mean(), many.spread().max) == (10_007, 5003.0, 10_006.0)
    assert many.spread().p50 == pytest.approx(5003, rel=0.05)
    steps = {after - before for before, after in zip(list(many), list(many)[1:], strict=False)}
    assert len(steps) == 1, "what is kept is spread evenly over all of them"
    assert (Samples().mean(), Samples().spread(), Samples([-3.0]).spread().max) == (0.0, Spread(0, 0, 0, 0), -3.0)


def test_what_a_run_measures_takes_no_more_memory_the_longer_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter and a tally after so many ticks and requests, and after ten times as many."""
    monkeypatch.setattr(Samples, "LIMIT", 128)

    def size(rounds: int) -> int:
        meter, tally = Meter(), Tally()
        request = RunRequest(0, 64, 1, prompt=lambda: np.zeros(64, np.int32), output=lambda: np.zeros(1, np.int32))
        monkeypatch.setattr(meter, "_arm", lambda: None)
        for number in range(rounds):
            meter._tick()
            tally.prompt(request._replace(number=number), 16, (16, 0, 0), 0.1, 8000.0, 1.0)
            tally.problem("nothing is right")
        meter.stop()
        return len(pickle.dumps((tally, meter.lag, meter.queued, meter.recent)))

    assert size(5000) <= 1.05 * size(500)


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 2


async def test_lateness_is_what_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(meter_module, "time", clock)
    meter = Meter()
    meter.start()
    for late in (0.0, 0.0, 0.060):
        clock.now += TICK + late
        meter._tick()
    clock.now -= TICK  # a timer that uvloop fires early is not late
    meter._tick()
    assert meter.lag.spread(1e3).max == pytest.approx(60)
    assert meter.lag.spread(1e3).p50 == pytest.approx(0, abs=1e-6)
    assert len(meter.recent) == 4
    assert [meter.worst_lag(), meter.worst_lag()] == pytest.approx([0.060, 0.0])
    meter.stop()
    elapsed = meter.elapsed()
    clock.now += 5
    meter.stop()
    assert meter.elapsed() == elapsed == pytest.approx(0.070)
    assert meter.cpu() == pytest.approx(0.035)
    assert meter.queued.spread(1e3).max >= 0
    assert peak_rss() > 1 << 20


def test_requests_without_a_cache_wait_in_the_same_line() -> None:
    """Two fit at a time; each came at its second and had its room for ten."""
    tally = Tally()
    line = UncachedEngine(tally, 100)
    placed = [line.come(at, 50) for at in (0.0, 1.0, 2.0, 3.0)]
    for one in reversed(placed):                       # they may end in any order, and are admitted in that of coming
        assert not tally.first_token_without
        line.left(one, 10.0, None if one is placed[2] else 0.5)
    assert list(tally.line_without) == [0.0, 0.0, 8.0]  # the third has its place at 10, and was cancelled later
    assert list(tally.first_token_without) == [0.5, 0.5, 8.5]


# Samples thin out without losing counts.


async def test_samples_thin_out_and_end_where_the_counters_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT", 4)
    kv = Full(bytes_per_token=16, device_tokens=8 * 16)
    async with AsyncCache(CacheConfig(model="m", components=(kv,), page_size=16)) as cache:
        tally, meter = Tally(), Meter()
        sampler = Sampler(cache, tally, meter)
        for start in range(3):
            prompt = list(range(1000 * start, 1000 * start + 64))
            async with cache.lease(prompt) as lease:
                await lease.commit(prompt)
            tally.tokens += 64
            sampler.take()
        evicted = cache.statistics().core.evicted_device
        assert evicted > 0
        for _ in range(8):
            sampler.take()
        report = sampler.report()
    assert report["evicted_device"][-1] == evicted
    assert report["tokens"][-1] == 192
    assert {len(column) for column in report["moved_bytes"].values()} == {len(report["t_s"])}
    assert 2 <= len(report["t_s"]) <= 5


def test_lag_is_the_worst_since_the_sample_before_also_where_that_was_left_out() -> None:
    taken = [{"t_s": float(i), "lag_max_ms": lag, "tokens": i} for i, lag in enumerate((3.0, 0.0, 2.0, 7.0, 1.0))]
    assert thinned(taken) == [
        {"t_s": 0.0, "lag_max_ms": 3.0, "tokens": 0}, {"t_s": 2.0, "lag_max_ms": 2.0, "tokens": 2},
        {"t_s": 4.0, "lag_max_ms": 7.0, "tokens": 4},
    ]  # fmt: skip


# The display: it fits 80 columns, works without a terminal, and says what went wrong.


TALLY = Tally(
    served=1_234_567, cancelled=123_456, tokens=3_000_000, device=1_000_000, host=500_000, storage=250_000,
    verified=123_456_789,
)
LOOKUPS = LookupStats(1_234_567, 2_900_000, {"device": 1_750_000}, {}, {}, 900_000)


def now(tally: Tally = TALLY, *, verify: bool = True) -> Screen:
    """A screen with the longest rows that a run may have."""
    tiers = (("L1", "█████████▉  100 %"), ("L2", "█████        50 %"))
    rates = (("L1→L2", "117.3 MiB/s"), ("L2→L1", "1144.4 MiB/s"), ("L2→L3", "0.0 MiB/s"), ("L3→L2", "83.9 MiB/s"))
    return Screen(
        "replay a-rather-long-name-of-a-recorded-conversation-trace.jsonl · full,swa,mamba · pages of 512",
        "1234 of 3600 s", 0.345,
        (*counts(tally, verify, 512, 1000.0, LOOKUPS), *tiers, *rates, ("lag", "p99 0.31 ms · max 123 ms"),
         ("memory", "12.0 GiB")),
        "interrupted: finishing what runs; press Ctrl-C again to cancel it",
    )  # fmt: skip


NOW = now()


def drawn(now: Screen, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(panel(now, width))
    return out.getvalue().rstrip("\n").split("\n")


def test_the_panel_fits_80_columns_and_shows_every_row() -> None:
    lines = drawn(NOW, 80)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 15, lines
    assert "1,234,567 served · 512 running" in lines[2]
    assert "1235/s · 123,456 cancelled" in lines[3]
    assert "58.3 % of tokens, ≤ 66.7 %" in lines[4]
    assert "all right" in lines[5]
    assert "1144.4 MiB/s" in lines[9]
    assert "83.9 MiB/s" in lines[11]
    assert lines[13].split() == ["memory", "12.0", "GiB"]


@pytest.mark.parametrize("width", [20, 39, 40, 60, 71, 72, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(NOW, width)
    assert max(map(len, lines)) <= width
    bar = next(row for row in lines if "█" in row)
    assert bar.rstrip().count("█") == int(0.345 * min(width, 80))
    if width >= 40:
        assert "…" not in "".join(lines[1:])
        assert "L2→L1     1144.4 MiB/s" in "\n".join(lines)


def test_a_run_that_verifies_nothing_does_not_say_that_all_is_right() -> None:
    shown = now(Tally(), verify=False)
    for said in (line(shown), "\n".join(drawn(shown, 80))):
        assert ("nothing is verified" in said, "right" in said) == (True, False)
    assert "3 WRONG" in line(now(replace(TALLY, mismatches=3)))
    assert all(part in line(NOW) for part in ("1,234,567 served", "512 running", "58.3 %", "all right", "34 %"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_rich_only_a_quiet_run_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(ConfigError, match=r"pip install 'rich>=13\.7' 'argcomplete>=3\.3', or use --quiet"):
        execute(RunSettings(command="stress", requests=1))
    assert execute(RunSettings(command="stress", requests=1, quiet=True)) == 0


def told(report: dict[str, Any], out: io.StringIO | None = None) -> str:
    """The summary, without the blanks at the ends of its lines."""
    out = out or io.StringIO()
    summary(report, out)
    return "\n".join(row.rstrip() for row in out.getvalue().rstrip().split("\n"))


SETTINGS = {
    "prefill_tokens_per_s": 8000.0, "verify": True, "device_tokens": 123_456_789, "host_tokens": 1_234_567_890,
    "page_size": 512, "bytes_per_token": 131_072, "storage": ["memory:", "file:/var/kv?capacity=10GiB"],
}  # fmt: skip


def report(**changes: Any) -> dict[str, Any]:
    stage = {"ops": 1_234_567, "pages": 123_456_789, "tokens": 123_456_789, "bytes": 9 << 40, "errors": 0,
             "latency_ms": {"p50": 1.25, "p99": 1234.0, "max": 5000.0}}
    spread = {"p50": 12.0, "p99": 1500.0, "p999": 2000.0, "max": 31_000.0}
    return {
        "command": "replay", "ok": True, "interrupted": False, "problems": [],
        "requests": 1_234_567, "served": 1_200_000, "cancelled": 34_000, "failed": 0, "entered_again": 567,
        "tokens": {"total": 144_793_823, "hit": {"device": 44_793_823, "host": 9_000_000, "storage": 1_000_000}},
        "verify": {"pages": 123_456_789, "mismatches": 0}, "ttft_mean_ms": 50.0, "ttft_without_cache_mean_ms": 150.0,
        "prefill_slowdown": 1.0,
        "line_without_cache_mean_ms": 10.0, "line_without_cache_ms": spread,
        "wait_mean_ms": 1.0, "wait_ms": spread, "ttft_ms": spread, "ttft_without_cache_ms": spread,
        "loop_lag_ms": spread, "run_queue_ms": spread, "elapsed_s": 1234.5, "cpu_s": 2345.6, "rss_bytes": 12 << 30,
        "leaks": {"device_pages": 0, "host_pages": 0, "pins": 0, "tasks": 0}, "lost_pages": 0, "ceiling": 0.412,
        "evicted": {"device": 12_345_678, "host": 1_234_567},
        "stages": dict.fromkeys(("backup_host", "load_back", "backup_storage", "prefetch"), stage),
        "settings": SETTINGS,
        "blocks": {"total": 276_491, "hit": 105_592, "shared": 105_592}, "block_size": 512, "format": "Qwen-Bailian",
        **changes,
    }


def test_the_summary_fits_80_columns_and_leads_with_the_verdict() -> None:
    lines = told(report()).split("\n")
    assert max(map(len, lines)) <= 80, [row for row in lines if len(row) > 80]
    assert lines[0].startswith("replay OK: 1,200,000 requests in")
    assert any("105,592 of 276,491 blocks" in row for row in lines)
    assert any("trace implies 105,592: 37.3 %" in row for row in lines)
    assert any("more than about 41.2 % of them" in row for row in lines)
    assert any("3.0 times sooner" in row for row in lines)
    assert any(row.startswith("left behind  nothing") for row in lines)


def test_the_summary_of_a_cache_that_costs_more_than_it_spares_says_why() -> None:
    assert "came later" not in told(report())
    stages = report()["stages"]
    slow = {**stages["prefetch"], "latency_ms": {"p50": 44.0, "p99": 9999.0, "max": 9999.0}}
    late = {"ttft_mean_ms": 1250.0, "ttft_without_cache_mean_ms": 1050.0, "wait_mean_ms": 1300.0,
            "stages": stages | {"prefetch": slow}}
    shown = told(report(**late))
    assert "hits saved 1.1 s of computing" in shown
    assert "requests waited 1.3 s, and 10.0 ms without it" in shown
    assert "prefetch, p50 44.0 ms, p99 10.0 s" in shown
    assert "little to spare" not in shown
    assert "queued" not in shown
    assert "Requests queued: 2000 arrived per second, and 972.1 were served" in told(
        report(**late, settings=SETTINGS | {"rate": 2000.0})
    )
    assert max(map(len, shown.split("\n"))) <= 80
    nothing = {"total": 1000, "hit": {"device": 100, "host": 0, "storage": 0}}
    idle = {name: {**stage, "ops": 0} for name, stage in stages.items()}
    shown = told(report(**late | {"tokens": nothing, "stages": idle}))
    assert "Only 10.0 % of the prompt tokens were hits" in shown
    assert "took longest" not in shown


def test_the_summary_says_what_went_wrong() -> None:
    shown = told(report(ok=False, problems=["request 7: 2 of 9 pages are wrong"],
                           leaks={"device_pages": 3, "host_pages": 0, "pins": 1, "tasks": 0}))
    assert shown.startswith("replay NOT OK")
    assert "✗ request 7: 2 of 9 pages are wrong" in shown
    assert "left behind  3 device pages, 1 pins" in shown


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[32m" in told(report(), Terminal())
    assert "\x1b" not in told(report())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in told(report(), Terminal())


def test_a_rank_that_was_lost_is_named_below_the_others() -> None:
    rank = {"rank": 0, "tp": 0, "cp": 0, "pp": 0, "verify": {"pages": 123_456_789, "mismatches": 0}, "batches": 12_345,
            "loop_lag_ms": {"p99": 1234.0}, "cpu_s": 1234.5}
    lost = {"rank": 1, "tp": 1, "cp": 0, "pp": 0, "lost": "was killed by signal 9"}
    shown = told(report(topology={"tp": 2, "cp": 1, "pp": 1}, ranks=[rank, lost]))
    assert shown.endswith("  rank 1 (1 0 0): was killed by signal 9")
    assert max(map(len, shown.split("\n"))) <= 80


def test_numbers_as_a_person_reads_them() -> None:
    assert [output.size(n) for n in (0, 999, 1536, 10 << 20, 3 << 40)] == [
        "0 B", "999 B", "1.5 KiB", "10.0 MiB", "3.0 TiB"]
    assert [output.milliseconds(v) for v in (0, 0.042, 1.24, 310.2, 2100)] == [
        "0 ms", "0.04 ms", "1.2 ms", "310 ms", "2.1 s"]
    assert output.percent(1, 0) == "0.0 %"
    assert (output.bar(0.5, 8), output.bar(0, 8), output.bar(2, 4), output.bar(0.3, 4)) == ("████", "", "████", "█▎")
