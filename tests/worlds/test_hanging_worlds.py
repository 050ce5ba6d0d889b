"""Worlds in which stores hang (``tests.worlds.hanging``). One that fails prints its seed, and
``ASYNCCACHE_SEED=<seed>`` plays it again. The first ones are for every commit, some more for the gate, and all of them
for ``make soak``, which plays worlds by new seeds as well.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from asynccache.core.plan import Wait
from asynccache.runtime import lease
from asynccache.runtime.core_calls import drive
from asynccache.runtime.driver import Driver
from asynccache.runtime.save import Lateness, StoreCall
from tests.simulated.patience import Overdue
from tests.worlds.hanging import play

FAST, GATE, ALL, CHUNK = 20, 120, 600, 20


def chunks() -> list[object]:
    """Ranges of seeds."""
    if seed := os.environ.get("ASYNCCACHE_SEED"):
        return [range(int(seed), int(seed) + 1)]
    marks = {FAST: (), GATE: (pytest.mark.slow(3),), ALL: (pytest.mark.soak,)}
    return [
        pytest.param(range(start, start + CHUNK), id=f"{start}-", marks=marks[min(end for end in marks if start < end)])
        for start in range(0, ALL, CHUNK)
    ]


@pytest.mark.parametrize("seeds", chunks())
def test_no_request_waits_longer_than_its_deadline_and_the_patience_of_the_store(seeds: Sequence[int]) -> None:
    met: dict[str, Counter[str]] = {"alone": Counter(), "scheduler": Counter(), "ranks": Counter()}
    hung = Counter[str]()
    for seed in seeds:
        report = play(seed)
        met[report.kind] += report.met
        hung += report.hung
    if len(seeds) == CHUNK:
        assert hung.total() > CHUNK, f"hardly any call has hung: {hung}"
        assert met["alone"]["served"] > 2 * CHUNK, f"a world that serves nobody shows nothing: {met}"
        assert met["ranks"]["served"] > CHUNK / 2
        assert met["scheduler"]["length"] > 2 * CHUNK
        assert met["alone"]["storage hit"] + met["scheduler"]["storage"] + met["ranks"]["storage hit"] > 0


# The worlds must be able to fail: each of these breaks one rule, and some world must notice.


def survivors(worlds: int) -> str:
    """Play worlds until somebody waits for too long in one; empty if nobody does."""
    for seed in range(worlds):
        try:
            play(seed)
        except Overdue as error:
            return str(error)
    return ""


def test_growth_that_only_the_end_of_a_copy_or_backup_wakes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(driver: Driver, call: Any, done: Any, check: Callable[[], object] | None = None) -> Any:
        answer = await drive(driver, call, done, check)
        if isinstance(answer, Wait) and (ended := driver.ops.watch(answer.ops)) is not None:
            for waiter in driver.growing:
                ended.add_done_callback(partial(_wake, waiter))
            driver.growing = set()
        return answer

    monkeypatch.setattr(lease, "drive", deaf)
    assert "extend" in survivors(60)


def _wake(waiter: asyncio.Future[None], ended: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def test_reads_that_do_not_make_storage_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Lateness.call

    @contextmanager
    def only_writes(self: Lateness, kind: StoreCall) -> Iterator[None]:
        if kind is StoreCall.READ:
            yield
        else:
            with call(self, kind):
                yield

    monkeypatch.setattr(Lateness, "call", only_writes)
    assert survivors(60)
