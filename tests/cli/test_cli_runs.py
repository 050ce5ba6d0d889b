"""Whole runs of ``stress`` and ``replay``: the real cache, small workloads, every page verified, and what fails a run
or the process that does it."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shlex
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop

from asynccache import AsyncCache
from asynccache.cli import session
from asynccache.cli.options import LOOPS
from asynccache.cli.service import Server
from asynccache.cli.traces import BLOCK_TOKENS
from asynccache.cli.workloads import RunRequest
from asynccache.errors import BackendError, InvariantViolation
from asynccache.runtime.lease import Lease
from tests.cli.trace_kit import BY_BLOCK, REAL, SMALL, Ran, made_trace, needs_trace, write_trace
from tests.processes import Running, run
from tests.waiting import wait_until

pytestmark = pytest.mark.slow(0.7)

STRESS = f"stress {SMALL}"
BLOCKS, ONE = " ".join(BY_BLOCK), "--concurrency 1"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return made_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("more", [
    *(f"--requests 120 --storage file:FOLDER/kv --loop {loop}" for loop in LOOPS),
    *(f"--requests 150 --faults 0.2 --cancel-rate 0.4 --seed 7 --write-policy {policy}"
      for policy in ("write_through", "write_through_selective", "write_back")),
    *(f"--requests 80 --storage none --prefetch-policy best_effort --components {components} --workload {workload}"
      for components in ("full", "full,swa", "full,mamba") for workload in ("chat", "agent")),
])  # fmt: skip
def test_stress_is_clean(more: str, ran: Ran) -> None:
    report = ran(f"{STRESS} {more}")
    hit, total = report["tokens"]["hit"], report["tokens"]["total"]
    assert report["served"] + report["cancelled"] == report["requests"]
    assert (report["cancelled"] > 15) == ("cancel" in more)
    assert min(hit["device"], hit["host"]) > 0
    assert report["hit_ratio"] == pytest.approx(sum(hit.values()) / total)
    assert report["verify"]["pages"] > (1000 if "loop" in more else 0)
    if "loop" in more:
        assert report["stages"]["backup_storage"]["bytes"] > 0
    if "none" in more:
        assert (report["hit_ratio"] > 0.1, hit["storage"]) == (True, 0)


def test_no_collection_of_what_was_loaded_before_falls_into_the_run(monkeypatch: pytest.MonkeyPatch, ran: Ran) -> None:
    """It would hold up the loop for 130 ms, once."""
    seen: list[int] = []
    serve = Server.serve

    async def counted(self: Server, *arguments: Any) -> None:
        seen.append(len(gc.get_objects(generation=2)))
        await serve(self, *arguments)

    monkeypatch.setattr(Server, "serve", counted)
    gc.unfreeze()
    before = len(gc.get_objects(generation=2))
    ran(f"{STRESS} --requests 2")
    assert seen[0] < before / 10


@pytest.mark.parametrize("room", [
    "--device-tokens all --host-tokens none", f"--device-tokens {60 * 512} --host-tokens {80 * 512} --storage memory: "
    "--prefetch-policy wait_complete",
])  # fmt: skip
def test_a_replay_hits_what_the_trace_implies_also_if_only_the_tiers_together_hold_it(
    room: str, trace: Path, ran: Ran
) -> None:
    report = ran(f"replay {trace} {ONE} {room}")
    blocks = report["blocks"]
    assert blocks["hit"] == blocks["shared"] > 100
    assert blocks["total"] == sum(len(json.loads(line)["hash_ids"]) - 1 for line in trace.read_text().splitlines())
    tiers = set(report["evicted"].values()) | {min(report["tokens"]["hit"].values())}
    assert 0 not in tiers if "memory" in room else tiers == {0}


def test_all_components_replay_by_the_clock_with_hints(trace: Path, ran: Ran) -> None:
    report = ran(f"replay {trace} --components full,swa,mamba --page-size 64 --device-tokens all --host-tokens all "
                 "--mamba-bytes 1024 --speed 100 --end-hints 0.5 --insert-outputs --storage memory: --limit 60")
    assert report["served"] == 60
    assert report["tokens"]["hit"]["device"] > 0


def test_the_second_run_starts_with_the_pages_of_the_first(trace: Path, ran: Ran) -> None:
    words = (f"replay {trace} --device-tokens {64 * 512} --host-tokens {512 * 512} --storage file:FOLDER/kv {ONE} "
             "--prefetch-policy wait_complete")  # fmt: skip
    first, second = ran(words), ran(words)
    assert first["blocks"]["hit"] == first["blocks"]["shared"] < first["blocks"]["total"]
    assert second["blocks"]["hit"] == second["blocks"]["total"]
    assert second["tokens"]["hit"]["storage"] > first["tokens"]["hit"]["storage"]


# pools that hang on others are filled, moved and verified like all others

HANGING = STRESS.replace("full,swa,mamba", "full,swa") + " --requests 80"


@pytest.mark.parametrize("storage", ["memory:?capacity=64MiB", "file:FOLDER/{}?capacity=256MiB"])
def test_stress_is_clean_with_the_stack_of_deepseek_v4(storage: str, ran: Ran) -> None:
    plain = ran(f"{HANGING} --storage {storage.format('plain')}")
    report = ran(f"{HANGING} --storage {storage.format('kv')} --sidecars deepseek-v4,draft:full:8")
    assert (plain["served"], report["served"]) == (80, 80)
    assert report["verify"]["pages"] > 1.5 * plain["verify"]["pages"], "each pool's pages are verified"
    assert report["tokens"]["hit"]["host"] > 0


def test_a_trace_is_replayed_with_the_stack_of_deepseek_v4(tmp_path: Path, ran: Ran) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", (
        {"timestamp": 0, "input_length": 512 * turn + 7, "output_length": 3, "hash_ids": [*range(turn), 100 + turn]}
        for turn in (2, 4, 6, 3, 6, 2)))  # fmt: skip
    report = ran(f"replay {trace} {ONE} --components full,swa --sidecars deepseek-v4 --page-size 256 "
                 "--device-tokens 8192 --host-tokens 16384 --bytes-per-token 64")
    assert sum(report["tokens"]["hit"].values()) == 512 * (2 + 4 + 3 + 6 + 2)


def test_stress_is_clean_with_sidecars_faults_and_cancellations(ran: Ran) -> None:
    report = ran(f"{STRESS} --requests 80 --faults 0.2 --cancel-rate 0.3 "
                 "--sidecars idx:full:8,tail:idx:3,state:swa:4,conv:mamba:2")
    assert report["cancelled"] > 5


# what is wrong fails the run


def never_released(monkeypatch: pytest.MonkeyPatch) -> None:
    release, calls = Lease.release, []

    def forgetful(self: Lease, after: Any = None, ended: bool = False) -> None:
        calls.append(self)
        if self is not calls[0]:
            release(self, after, ended)

    monkeypatch.setattr(Lease, "release", forgetful)


def lost_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = AsyncCache.flush

    async def losing(self: AsyncCache, timeout: float | None = None) -> Any:
        unsaved = await flush(self, timeout)
        shelves = self.core.world.shelves
        shelves[0].slots.take(2)
        shelves[len(shelves) // 2].slots.take(3)
        return unsaved

    monkeypatch.setattr(AsyncCache, "flush", losing)


def a_task_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    aclose, tasks = AsyncCache.aclose, []

    async def littering(self: AsyncCache) -> Any:
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        return await aclose(self)

    monkeypatch.setattr(AsyncCache, "aclose", littering)


def a_flipped_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Lease.loaded
    hits: list[int] = []

    async def flipping(self: Lease) -> None:
        await loaded(self)
        if self.cached and not hits:
            hits.append(self.cached)
            self._head.worker.pools["full"].layer(2)[int(self.pages[0]), 5] ^= 16

    monkeypatch.setattr(Lease, "loaded", flipping)


def a_broken_law(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(core: object, idle: bool = False) -> None:
        raise InvariantViolation("node 7 is its own parent")

    monkeypatch.setattr("asynccache.core.audit.check", broken)


def fails(place: str, error: Exception) -> Callable[[pytest.MonkeyPatch], None]:
    """The coroutine that is there fails."""

    async def failing(*_: object) -> None:
        raise error

    return lambda monkeypatch: monkeypatch.setattr(place, failing)


def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


a_store_that_cannot_close = fails("asynccache_backends.memory.MemoryBackend.aclose", BackendError("the disk is gone"))
a_cache_that_closes_itself = fails("asynccache.worker.stages.BackupHostStage.run", RuntimeError("no such luck"))


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, str, dict[str, int]]] = [
    (nothing, "", "", {}),
    (nothing, "--components full --device-tokens 1024 --host-tokens 2048", "gave up", {}),
    (never_released, "", "left behind", {}),
    (lost_slots, "", "left behind", {"device_pages": 2, "host_pages": 3}),
    (a_task_that_is_left, "", "left behind", {"tasks": 1}),
    (a_broken_law, "", "a law of the core is broken: node 7 is its own parent", {}),
    (a_flipped_bit, "--requests 80 --concurrency 2",    # few at a time: somebody hits
     r"pages are wrong.*full page 0 in slot \d+ differs from layer 2 on", {}),
    (a_store_that_cannot_close, "--storage memory:", "could not close cleanly: .*the disk is gone", {}),
    (a_cache_that_closes_itself, "", "closed itself.*no such luck", {}),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "more", "problem", "leaks"), FAULTS, ids=[one[2] for one in FAULTS])
def test_what_is_wrong_fails_the_run_and_is_all_that_a_quiet_one_says(
    fault: Callable[[pytest.MonkeyPatch], None], more: str, problem: str, leaks: dict[str, int], ran: Ran,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fault(monkeypatch)
    report = ran(f"{STRESS} --requests 20 {more}", status=int(bool(problem)))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert (shown.err == "") == (not problem)
    assert not problem or any(re.search(problem, said) for said in report["problems"]), report["problems"]
    assert report["ok"] == (not problem)
    assert report["leaks"].items() >= leaks.items()
    assert (min(report["leaks"]["pins"], report["leaks"]["device_pages"]) > 0) == (fault is never_released)
    assert (report["verify"]["mismatches"] > 0) == (fault is a_flipped_bit)
    assert (report["failed"] > 0) == (problem == "gave up" or fault is a_cache_that_closes_itself)


@pytest.mark.parametrize("debug", ["", "1"])
def test_a_request_that_meets_a_bug_is_a_sentence_and_its_traceback_is_in_the_report(
    debug: str, monkeypatch: pytest.MonkeyPatch, ran: Ran, capsys: pytest.CaptureFixture[str]
) -> None:
    async def breaks(self: Server, request: RunRequest, places: asyncio.Semaphore | None = None) -> None:
        raise KeyError("x")

    monkeypatch.setattr(Server, "serve", breaks)
    monkeypatch.setenv("ASYNCCACHE_DEBUG", debug)
    report = ran(f"{STRESS} --requests 5", status=1)
    said = capsys.readouterr().err
    assert "met KeyError: 'x'" in said
    assert ("Traceback" in said, "--debug shows where" in said) == (bool(debug), not debug)
    assert "in breaks" in report["traceback"]


@pytest.mark.parametrize("loop", [None, *LOOPS])
def test_uvloop_runs_it_unless_asyncio_is_asked_for(
    loop: str | None, monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    found: list[type] = []
    run = session.Session.run

    async def noting(self: session.Session) -> Any:
        found.append(type(asyncio.get_running_loop()))
        return await run(self)

    monkeypatch.setattr(session.Session, "run", noting)
    ran(f"{STRESS} --requests 5 {'' if loop is None else f'--loop {loop}'}")
    assert (found[0] is uvloop.Loop) == (loop != "asyncio")


# stores


@pytest.mark.parametrize("change", ["--page-size 32", "--layers 2", "--bytes-per-token 128"])
def test_what_other_settings_stored_is_never_served(change: str, ran: Ran) -> None:
    """Pages of another shape have other keys: a store that holds them only misses. One request at a time, for of two
    at once the later may fetch what the earlier has just stored."""
    words = (f"{STRESS} --requests 20 --storage file:FOLDER/kv?capacity=256MiB --end-hints 0 --device-tokens 131072 "
             f"--host-tokens 131072 {ONE}")  # fmt: skip
    first, other, same = (ran(words, *more.split())["tokens"]["hit"]["storage"] for more in ("", change, ""))
    assert (first, other) == (0, 0)
    assert same > 0


def test_a_run_with_faults_lets_go_of_its_store(ran: Ran) -> None:
    """The backend that tells lies is the command's own: a second run of this process finds its folder free."""
    threads = threading.active_count()
    for _ in range(2):
        ran(f"{STRESS} --requests 20 --storage file:FOLDER/kv?capacity=64MiB --faults 0.1")
    assert threading.active_count() == threads


# a process that was killed, bits that were flipped, a disk that is full

MIB = 1 << 20


def killed(words: str, written: int) -> None:
    """Start a process of its own and kill it once it has written so many bytes."""
    with Running("-m", "asynccache", *shlex.split(words), "--quiet") as command:
        io = Path(f"/proc/{command.process.pid}/io")

        def enough() -> bool:
            assert command.process.poll() is None, f"it ended before it was killed: {command.ended()}"
            return int(io.read_text().partition("wchar: ")[2].split()[0]) >= written

        wait_until(enough, "it wrote too little", seconds=120)
        assert command.ended(signal.SIGKILL).returncode == -signal.SIGKILL


@pytest.mark.slow(10)
def test_a_replay_that_was_killed_is_replayed_from_what_it_had_stored(tmp_path: Path, ran: Ran) -> None:
    """There is room for everything in L1 and L2, so what comes from storage was stored by a process that was killed."""
    made = made_trace(tmp_path / "trace.jsonl", 40, requests=240, growth=(2, 12), seed=11)
    words = (f"replay {made} --components full --device-tokens all --host-tokens all --bytes-per-token 64 "
             "--concurrency 8 --prefetch-policy wait_complete "
             f"--storage 'file:{tmp_path}/kv?capacity=1GiB&segment=16MiB'")  # fmt: skip
    for written in (9 * MIB, 4 * MIB, 23 * MIB):
        killed(words, written)
    again, last = ran(words), ran(words)
    assert again["storage"]["scanned_groups"] > 0, "no footer can name what was written right before the kill"
    assert again["storage"]["corrupt_pages"] == 0
    assert last["tokens"]["hit"]["storage"] > again["tokens"]["hit"]["storage"] > 64 * BLOCK_TOKENS
    assert again["blocks"]["hit"] > again["blocks"]["shared"]
    assert last["blocks"]["hit"] == last["blocks"]["total"]


def test_flipped_bits_in_a_store_are_misses_once_and_never_wrong_pages(tmp_path: Path, ran: Ran) -> None:
    """A fetch ends before the first page that does not verify, so a path with several takes as many runs."""
    trace, rng = made_trace(tmp_path / "trace.jsonl", 10, requests=60, growth=(2, 12), seed=11), Random(4)
    words = f"replay {trace} {BLOCKS} --device-tokens all --host-tokens all --storage 'file:FOLDER/kv?segment=4MiB'"
    first = ran(words)
    for path in (path for path in (tmp_path / "kv").iterdir() if path.stat().st_size >= MIB):
        raw = bytearray(path.read_bytes())
        for at in range(0, min(first["stages"]["backup_storage"]["bytes"], len(raw)), 100_000):
            raw[at + rng.randrange(min(100_000, len(raw) - at))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
    found = [ran(words) for _ in range(8)]
    corrupt = [report["storage"]["corrupt_pages"] for report in found]
    assert corrupt[0] > 5
    assert found[0]["tokens"]["hit"]["storage"] > 0
    assert found[0]["blocks"]["hit"] < found[0]["blocks"]["total"]
    assert sorted(corrupt, reverse=True) == corrupt, "what did not verify is deleted and stored anew"
    assert corrupt[-1] == 0
    assert found[-1]["blocks"]["hit"] == found[-1]["blocks"]["total"]


def test_on_a_full_disk_the_cache_works_without_storing_and_counts_it(tmp_path: Path) -> None:
    """No file of this process may grow beyond 1 MiB, which is less than a segment."""
    limited = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
               "from asynccache.cli.main import main; sys.exit(main(sys.argv[1:]))")  # fmt: skip
    report = tmp_path / "report.json"
    done = run("-c", limited, *STRESS.split(), "--requests", "60", "--quiet", "--json", report,
               "--storage", f"file:{tmp_path}/kv?capacity=64MiB&segment=2MiB")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert (found["ok"], found["served"], found["verify"]["mismatches"]) == (True, 60, 0)
    assert found["tokens"]["hit"]["host"] > 0
    assert found["storage"]["refused_writes"] > found["storage"]["errors"] >= 1, "writes are given up for a while"
    assert found["stages"]["backup_storage"]["errors"] > 0


@pytest.mark.soak
@needs_trace
def test_the_real_trace_hits_all_that_it_implies(ran: Ran) -> None:
    report = ran(f"replay {REAL} {BLOCKS} --device-tokens all --host-tokens none {ONE}")
    assert (report["blocks"]["hit"], report["blocks"]["total"]) == (105_592, 276_491)
    assert report["verify"] == {"pages": 105_592, "mismatches": 0}
