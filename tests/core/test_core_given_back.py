"""Room on the host that a call gives back: backups that waited for it begin, and removals are announced."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from asynccache.core.cache import Skip
from asynccache.core.plan import BackupHost, Medium, More, Publish
from asynccache.core.settings import ComponentSlots
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import SPACE, SWA, Running, SynchronousRuntime, core_config, spell


def fetching(text: str, **options: Any) -> tuple[SynchronousRuntime, Fetch]:
    """A process that has nothing but a prefetch of ``text`` in flight, with all of its FULL pages taken."""
    first = SynchronousRuntime(core_config())
    first.insert(text)
    first.flush()
    run = SynchronousRuntime(core_config(**options), storage=first.storage)
    fetch = open_fetch(run, spell(text))
    assert isinstance(fetch, Fetch)
    assert fetch.take_full(len(text)) == len(text)
    return run, fetch


def put_off(run: SynchronousRuntime) -> None:
    """A commit finds the host full."""
    run.insert("xy")
    assert run.in_flight(BackupHost) == []
    assert run.core.statistics().deferred_backups == 1


def test_a_prefetch_that_gives_pages_back_starts_the_backups_that_were_put_off() -> None:
    run, fetch = fetching("abcd", host=4)
    put_off(run)
    fetch.release()
    assert run.in_flight(BackupHost), "the pages are free, and nobody tried again"
    assert run.core.statistics().deferred_backups == 0
    run.settle()
    run.audit(idle=True)


def test_what_the_end_of_a_prefetch_removes_is_said_in_its_own_plan() -> None:
    first = SynchronousRuntime(core_config())
    first.insert("abcd")
    first.flush()
    run = SynchronousRuntime(core_config(), storage=first.storage)
    run.insert("ab")
    run.settle()
    fetch = open_fetch(run, spell("abcd"))
    assert isinstance(fetch, Fetch)
    fetch.take_full(2)
    while isinstance(answer := run.core.invalidate(SPACE), More):
        run.perform(answer.plan)
    run.perform(answer)
    plan = fetch.commit(16)
    gone = [effect for effect in plan.effects if isinstance(effect, Publish) and effect.medium is Medium.CPU]
    assert [effect.stored for effect in gone] == [False]
    assert run.core.complete(()).effects == ()
    run.audit(idle=True)


def narrow(components: str, host: int) -> SynchronousRuntime:
    """A host with so little room for the last component."""
    config = core_config(components, window=12)
    *others, last = config.components
    last = ComponentSlots(last.kind, last.device, host, last.window)
    return SynchronousRuntime(dataclasses.replace(config, components=(*others, last)))


def test_what_can_never_fit_the_host_is_not_put_off_again_and_again() -> None:
    run = narrow("full,mamba", 0)
    request = run.lease(spell("abcd"))
    assert request is not None
    request.compute(16)
    assert request.commit()
    run.settle()
    assert request.commit(checkpoint=16)
    assert run.core.statistics().deferred_backups == 0, "the host has no room for states, now or ever"
    request.release()
    run.settle()
    run.audit(idle=True)


@pytest.mark.parametrize("text", ["abcde", "abcdefghijklmno"])
def test_of_what_fits_the_host_only_in_parts_the_window_is_saved(text: str) -> None:
    run = narrow("full,swa", 3)
    run.insert(text)
    run.settle()
    assert run.core.statistics().host[SWA].free == 0, "a window has three pages, and so many the host holds"
    push_out = run.lease(spell("z" * 64))
    assert push_out is not None
    push_out.release()
    assert run.reach(text) == (0, len(text))
    run.settle()
    run.audit(idle=True)


def test_of_a_path_that_is_longer_than_the_host_the_start_is_saved() -> None:
    run = SynchronousRuntime(core_config(host=4))
    request = run.lease(spell("abcdefgh"))
    assert request is not None
    for end in (12, 24, 32):
        request.compute(end)
        assert request.commit()
    request.release()
    run.settle()
    assert run.core.statistics().deferred_backups == 0
    push_out = run.lease(spell("z" * 64))
    assert push_out is not None
    push_out.release()
    assert run.reach("abcdefgh") == (0, 3)
    run.audit(idle=True)


def test_a_prefetch_below_a_path_that_is_longer_than_the_host_is_skipped() -> None:
    first = SynchronousRuntime(core_config())
    first.insert("abcdefghijkl")
    first.flush()
    run = SynchronousRuntime(core_config(host=4), storage=first.storage)
    run.insert("abcdefgh")
    run.settle()
    assert isinstance(open_fetch(run, spell("abcdefghijkl")), Skip)
    run.audit(idle=True)


@pytest.mark.parametrize("host", [0, 64])
def test_what_is_forgotten_leaves_when_its_last_holder_goes_however_much_it_is(host: int) -> None:
    run = SynchronousRuntime(core_config(device=64, host=host, slice_steps=4))
    holders = []
    for text in [f"a{chr(i)}" for i in range(40)]:
        request = run.lease(spell(text))
        assert request is not None
        request.compute(8)
        assert request.commit()
        holders.append(request)
    run.settle()
    answer = run.core.invalidate(SPACE)
    while isinstance(answer, More):
        run.perform(answer.plan)
        answer = run.core.sweep()
    run.perform(answer)
    assert run.core.statistics().nodes == 41, "the holders have lost pages"
    run.prompt = False
    for request in holders:
        request.release()
    run.prompt = True
    run.perform(run.core.follow_up())
    assert run.core.statistics().nodes == 0, "some are left, and nobody is told to go on"
    run.audit(idle=True)


def test_a_release_of_what_is_forgotten_looks_at_its_own_path_alone() -> None:
    run = SynchronousRuntime(core_config(device=256, host=0))
    holders = []
    for i in range(200):
        request = run.lease(spell(chr(i)))
        assert request is not None
        request.compute(4)
        assert request.commit()
        holders.append(request)
    answer = run.core.invalidate(SPACE)
    assert not isinstance(answer, More)
    run.perform(answer)
    steps = run.core.world.steps
    holders[77].release()
    assert run.core.statistics().nodes == 199
    assert run.core.world.steps - steps < 10


def forgotten(texts: list[str], **options: Any) -> tuple[SynchronousRuntime, list[Running]]:
    """Requests that hold these texts, a node each, in a namespace that is forgotten then. A call drops few nodes."""
    run = SynchronousRuntime(core_config(host=0, slice_steps=2, **options))
    held = []
    for text in texts:
        for end in range(1, len(text) + 1):
            run.insert(text[:end])
        request = run.lease(spell(text), limit=len(text) * run.page)
        assert request is not None
        held.append(request)
    while isinstance(answer := run.core.invalidate(SPACE), More):
        run.perform(answer.plan)
    run.perform(answer)
    assert not run.core.behind
    run.prompt = False
    return run, held


def follow_up(run: SynchronousRuntime) -> int:
    """Follow up until nothing is left to do. Returns in how many calls."""
    calls = 0
    while run.core.behind:
        calls += 1
        run.perform(run.core.follow_up())
    return calls


def test_all_that_is_left_of_a_forgotten_namespace_is_given_back_however_small_the_slices_are() -> None:
    run, (request,) = forgotten(["abcdefgh"])
    request.release()
    assert follow_up(run) > 2
    run.audit(idle=True)


def test_what_is_given_back_behind_a_pass_that_is_under_way_is_dropped_by_the_next_one() -> None:
    run, requests = forgotten(["abcdefgh", "ijklmnop", "qrstuvwx"])
    for first in requests:
        first.release()
        for _ in range(3):
            run.perform(run.core.follow_up())
    follow_up(run)
    run.audit(idle=True)


def test_nobody_follows_up_for_ever_where_a_request_holds_a_forgotten_namespace() -> None:
    run, (first, second) = forgotten(["abcdefgh", "ijklmnop"])
    first.release()
    run.perform(run.core.follow_up())
    run.perform(run.core.follow_up())
    run.perform(run.core.complete(()))
    assert follow_up(run) < 40
    second.release()
    follow_up(run)
    run.audit(idle=True)
