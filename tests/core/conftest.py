"""What every test of the core ends with: all is given back, and nothing is left."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from asynccache.core import audit
from asynccache.core.plan import Plan
from tests.simulated.synchronous import SynchronousRuntime


@pytest.fixture
def breaks_a_core() -> None:
    """For a test that leaves a core in a state that it cannot come to by itself."""


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test, whoever still holds something in one of its cores gives it back, and everything in flight ends:
    then the audit of an idle core must find nothing held and no page missing. So no test has to end with that."""
    made: list[weakref.ref[SynchronousRuntime]] = []
    make = SynchronousRuntime.__init__

    def noted(run: SynchronousRuntime, *args: Any, **named: Any) -> None:
        make(run, *args, **named)
        made.append(weakref.ref(run))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SynchronousRuntime, "__init__", noted)
        yield
    for run in filter(None, [one() for one in made]):
        if "breaks_a_core" not in request.fixturenames:
            _end(run)


def _end(run: SynchronousRuntime) -> None:
    core = run.core
    run.prompt = True
    for running in list(run.running):
        running.release()
    for lease in core.active_leases():
        run.perform(core.release(lease))
    for fetch in core.active_fetches():
        run.perform(core.prefetch_release(fetch.op.id))
    for holder in list(core._transfers.claims.held):
        run.perform(core.release_claim(holder))
    run.perform(Plan())
    run.settle()
    audit.check(core, idle=True)
    tiers = core.statistics()
    assert all(shelf.free + shelf.evictable == shelf.capacity for shelf in (*tiers.device, *tiers.host))
