"""Seeded worlds over the real runtime. One that fails prints its seed; ``ASYNCCACHE_SEED=<seed>`` plays it again.

``ASYNCCACHE_WORLDS`` says how many worlds to play from seed 0 on, instead of the usual number. The usual number was
measured: see ``CONTRIBUTING.md``. ``make soak`` plays worlds by new seeds.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest

from asynccache.errors import CopyFailed
from asynccache.runtime.engine_batches import EngineBatches, Fences, not_over
from asynccache.runtime.lease import Publishing
from asynccache.worker.local import LocalBatch
from asynccache.worker.work import BatchInFlight
from tests.simulated.loop import Deadlock
from tests.simulated.world import WrongBytes, play

FAST, ALL, CHUNK = 25, 200, 25


def chunks() -> list[object]:
    """Ranges of seeds; those beyond the first are for the full gate."""
    if seed := os.environ.get("ASYNCCACHE_SEED"):
        return [range(int(seed), int(seed) + 1)]
    worlds = int(os.environ.get("ASYNCCACHE_WORLDS", ALL))
    ranges = [range(start, min(start + CHUNK, worlds)) for start in range(0, worlds, CHUNK)]
    return [pytest.param(r, marks=[pytest.mark.slow(3)] if r.start >= FAST else [], id=f"{r.start}-") for r in ranges]


@pytest.mark.parametrize("seeds", chunks())
def test_worlds(seeds: Sequence[int]) -> None:
    ends: Counter[str] = Counter()
    hits: Counter[str] = Counter()
    choices: Counter[str] = Counter()
    verified = 0
    for seed in seeds:
        report = play(seed)
        ends += report.ends
        hits += report.hits
        choices += report.choices
        verified += report.verified
    if len(seeds) == CHUNK:
        assert ends["served"] > 3 * CHUNK, f"a world that serves nobody shows nothing: {ends}"
        assert ends["cancelled"], ends
        assert all(hits[tier] for tier in ("device", "host", "storage")), f"a tier was never hit: {hits}"
        assert verified > 50 * CHUNK
        assert choices["led"] > choices["choices"] / 4 > CHUNK / 4, f"p2c hardly ever leads: {choices}"


def test_one_seed_is_one_world() -> None:
    assert repr(play(7)) == repr(play(7))


# The worlds must be able to fail: each of these breaks one rule, and some world must notice.


def survivors(worlds: int) -> str:
    """Play worlds until one fails; empty if none did."""
    for seed in range(worlds):
        try:
            play(seed)
        except (WrongBytes, Deadlock, AssertionError, CopyFailed) as error:
            return type(error).__name__
    return ""


def test_a_backup_that_does_not_wait_for_ready_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineBatches, "pending", lambda self: [])
    assert survivors(300) == "WrongBytes"


def test_a_failed_batch_that_counts_as_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalBatch, "failed", property(lambda self: False))
    assert survivors(300) == "WrongBytes"


def test_pages_that_are_free_before_the_engine_let_go_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    retire = EngineBatches.retire
    monkeypatch.setattr(EngineBatches, "retire", lambda self, ops, batches: retire(self, ops, []))
    assert survivors(600) == "WrongBytes"


def test_a_load_that_does_not_wait_for_the_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fences, "add", lambda self, batch, slots: None)
    assert survivors(600) == "WrongBytes"


def test_a_load_that_does_not_wait_for_what_a_commit_named_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def expect(self: Publishing, ready: BatchInFlight) -> None:
        self._ready = [*not_over(*self._ready), ready]

    monkeypatch.setattr(Publishing, "expect", expect)
    assert survivors(600) == "WrongBytes"
