"""Exit statuses other than 0, refusals before anything starts, and the settings that a run's options lead to."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import uvloop

from asynccache.cli import session
from asynccache.cli.main import main
from asynccache.cli.options import LOOPS
from asynccache.core import audit
from asynccache.errors import InvariantViolation
from asynccache.runtime.cache import AsyncCache
from asynccache.runtime.lease import Lease
from tests.cli.trace_kit import ALL

SMALL = [*ALL, "--rate", "0", "--concurrency", "8", "--bytes-per-token", "64", "--mamba-bytes", "1024", "--window",
         "256", "--device-tokens", "12288", "--host-tokens", "24576", "--quiet", "--requests", "20"]


def stress(tmp_path: Path, *more: str) -> tuple[int, dict[str, Any]]:
    report = tmp_path / "report.json"
    status = main(["stress", *SMALL, "--json", str(report), *more])
    return status, json.loads(report.read_text())


# what is wrong fails the run


def test_a_lease_that_is_never_released_is_a_leak_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, calls = Lease.release, []

    def forgetful(self: Lease, after: Any = None, ended: bool = False) -> None:
        calls.append(self)
        if self is not calls[0]:
            release(self, after, ended)

    monkeypatch.setattr(Lease, "release", forgetful)
    status, report = stress(tmp_path)
    assert status == 1
    assert report["leaks"]["pins"] > 0
    assert report["leaks"]["device_pages"] > 0
    assert any("left behind" in problem for problem in report["problems"])


def test_slots_that_nobody_has_are_a_leak_and_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flush = AsyncCache.flush

    async def losing(self: AsyncCache, timeout: float | None = None) -> Any:
        unsaved = await flush(self, timeout)
        shelves = self.core.world.shelves
        shelves[0].slots.take(2)
        shelves[len(shelves) // 2].slots.take(3)
        return unsaved

    monkeypatch.setattr(AsyncCache, "flush", losing)
    status, report = stress(tmp_path)
    assert status == 1
    assert (report["leaks"]["device_pages"], report["leaks"]["host_pages"]) == (2, 3)


def test_a_task_that_is_left_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aclose, tasks = AsyncCache.aclose, []

    async def littering(self: AsyncCache) -> Any:
        tasks.append(asyncio.create_task(asyncio.Event().wait()))
        return await aclose(self)

    monkeypatch.setattr(AsyncCache, "aclose", littering)
    status, report = stress(tmp_path)
    assert (status, report["leaks"]["tasks"]) == (1, 1)


def test_a_broken_law_of_the_core_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(core: object, idle: bool = False) -> None:
        raise InvariantViolation("node 7 is its own parent")

    monkeypatch.setattr(audit, "check", broken)
    status, report = stress(tmp_path)
    assert status == 1
    assert report["problems"] == ["a law of the core is broken: node 7 is its own parent"]


def test_one_flipped_bit_on_the_device_is_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Lease.loaded
    hits: list[int] = []

    async def flipping(self: Lease) -> None:
        await loaded(self)
        if self.cached and not hits:
            hits.append(self.cached)
            pool = self._head.worker.pools["full"]
            pool.layer(2)[int(self.pages[0]), 5] ^= 16

    monkeypatch.setattr(Lease, "loaded", flipping)
    status, report = stress(tmp_path, "--requests", "80", "--concurrency", "2")  # few at a time: somebody hits
    assert hits
    assert status == 1
    assert report["verify"]["mismatches"] >= 1
    assert "full page 0 in slot" in report["problems"][0]
    assert "differs from layer 2 on" in report["problems"][0]


# refused before anything starts


@pytest.mark.parametrize("change", [["--page-size", "32"], ["--layers", "2"], ["--bytes-per-token", "128"]])
@pytest.mark.slow(1)
def test_what_other_settings_stored_is_never_served(change: list[str], tmp_path: Path) -> None:
    """Pages of another shape have other keys: a store that holds them only misses. One request at a time, for of two
    at once the later may fetch what the earlier has just stored."""
    store = ["--storage", f"file:{tmp_path}/kv?capacity=256MiB", "--end-hints", "0", "--device-tokens", "131072",
             "--host-tokens", "131072", "--concurrency", "1"]  # fmt: skip
    _, first = stress(tmp_path, *store)
    status, other = stress(tmp_path, *store, *change)
    assert (status, other["tokens"]["hit"]["storage"]) == (0, 0)
    status, same = stress(tmp_path, *store)
    assert (status, first["tokens"]["hit"]["storage"]) == (0, 0)
    assert same["tokens"]["hit"]["storage"] > 0


def test_a_folder_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = ["--storage", f"file:{tmp_path}/kv?capacity=64MiB"]
    assert main(["stress", *SMALL, *store]) == 0
    manifest = tmp_path / "kv" / "manifest.json"
    rewrite_schema(manifest)
    before = {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir() if path.name != "lock"}
    capsys.readouterr()
    assert main(["stress", *SMALL, *store]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/kv' was written by another schema: {'ab' * 32}" in error
    assert error.count("\n") == 1
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "kv").iterdir() if path.name != "lock"}


def rewrite_schema(manifest: Path) -> None:
    from asynccache_backends.file.folder import Manifest, pack_manifest

    fields = json.loads(manifest.read_text())["manifest"] | {"schema": "ab" * 32}
    manifest.write_bytes(pack_manifest(Manifest(**fields)))


def test_a_run_with_faults_lets_go_of_its_store(tmp_path: Path) -> None:
    """The backend that tells lies is the command's own: a second run of this process finds its folder free."""
    store = ["--storage", f"file:{tmp_path}/kv?capacity=64MiB", "--faults", "0.1"]
    threads = threading.active_count()
    for _ in range(2):
        assert stress(tmp_path, *store)[0] == 0
    assert threading.active_count() == threads


# loops, files


@pytest.mark.parametrize("loop", [None, *LOOPS])
def test_uvloop_runs_it_unless_asyncio_is_asked_for(
    loop: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[type] = []
    run = session.Session.run

    async def noting(self: session.Session) -> Any:
        ran.append(type(asyncio.get_running_loop()))
        return await run(self)

    monkeypatch.setattr(session.Session, "run", noting)
    status, _ = stress(tmp_path, *([] if loop is None else ["--loop", loop]))
    assert status == 0
    assert (ran[0] is uvloop.Loop) == (loop != "asyncio")


def test_quiet_says_nothing_unless_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", *SMALL]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["stress", *SMALL, "--components", "full", "--device-tokens", "1024", "--host-tokens", "2048"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "gave up" in shown.err
