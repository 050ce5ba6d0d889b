"""What a batch did not compute is not there: it leaves the tree with all that hangs below it, and is neither saved nor
announced; who holds some of it is told, and keeps it until the end."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.cache import Grant
from asynccache.core.plan import BackupHost, BackupStorage, Compute, LoadBack, Medium, Plan, Retire
from tests.simulated.synchronous import (
    FULL,
    MAMBA,
    SPACE,
    SWA,
    Running,
    SynchronousRuntime,
    core_config,
    spell,
)

KINDS = ["full", "full,swa", "full,mamba", "full,swa,mamba"]


def runtime(components: str = "full", **options: Any) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, **({"window": 4} | options)))


def enter(run: SynchronousRuntime, text: str) -> Running:
    running = run.lease(spell(text))
    assert running is not None
    run.complete(*[op for op in running.lease.loads if op in run.jobs])
    return running


def insert(run: SynchronousRuntime, text: str) -> None:
    run.insert(text, checkpoint=len(text) if MAMBA in run.kinds else 0)


def publish(run: SynchronousRuntime, text: str, *, fails: bool = True, state: bool = True) -> Running:
    """Compute and commit ``text`` in a batch that is not over; it has failed already if ``fails``, which nobody
    knows."""
    running = enter(run, text)
    running.compute(len(text) * run.page, fails)
    with_state = state and MAMBA in run.kinds
    assert running.commit(checkpoint=len(text) * run.page if with_state else None, computed=False)
    return running


def computing(run: SynchronousRuntime) -> list[int]:
    return run.in_flight(Compute)


def reach(run: SynchronousRuntime, text: str) -> int:
    return run.reach(text)[1]


def is_empty(run: SynchronousRuntime) -> bool:
    """Whether nothing is left: no page on any tier, and nothing in flight."""
    run.settle()
    run.audit(idle=True)
    shelves = run.core.statistics()
    return all(shelf.free == shelf.capacity for shelf in (*shelves.device, *shelves.host))


@pytest.mark.parametrize("components", KINDS)
def test_a_failed_batch_takes_what_it_published_and_all_below_it_out_of_the_tree(components: str) -> None:
    """In between the node was split, and another request has committed below both pieces."""
    run = runtime(components)
    insert(run, "ab")
    first = publish(run, "abcdef")
    other = enter(run, "abcxyz")
    assert other.lease.cached == (2 if MAMBA in run.kinds else 3) * run.page
    other.compute(6 * run.page)
    assert other.commit()
    last = enter(run, "abcdefg")
    last.compute(7 * run.page)
    assert last.commit()
    run.tell(*computing(run))
    assert reach(run, "abcdefg") == reach(run, "abcxyz") == 2
    assert {running.lease.valid for running in (first, last)} == {2 * run.page}
    assert len(run.published_on(Medium.GPU)) == 2
    for running in (first, other, last):
        running.release()
    run.settle()
    run.audit(idle=True)
    assert reach(run, "abcdefg") == 2
    assert len(run.published_on(Medium.CPU)) == len(run.published_on(Medium.STORAGE)) == 2
    assert {digest for kind, digest in run.storage if kind == FULL} == set(run.chain(SPACE, spell("ab")))


@pytest.mark.parametrize("acked", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fails", [False, True], ids=["ran", "failed"])
@pytest.mark.parametrize("components", KINDS)
def test_a_backup_counts_only_if_the_batch_ran_whichever_is_known_first(
    components: str, fails: bool, acked: bool
) -> None:
    run = runtime(components)
    publish(run, "abc", fails=fails).release()
    for ops in ((computing, backups) if acked else (backups, computing)):
        run.complete(*ops(run))
        if ops is backups and not acked:
            assert not run.published_on(Medium.CPU)
            assert not run.in_flight(BackupStorage)
    run.settle()
    assert bool(run.storage) is bool(run.published_on(Medium.CPU)) is not fails
    assert reach(run, "abc") == (0 if fails else 3)
    if fails:
        assert is_empty(run)


def backups(run: SynchronousRuntime) -> list[int]:
    return run.in_flight(BackupHost)


def test_pages_below_a_batch_that_is_not_over_are_not_saved_either() -> None:
    """Its own pages had a copy on the host before, so no backup of them comes first."""
    run = runtime(device=8, host=16)
    run.insert("ab")
    run.flush()
    run.insert("xyzuvw")
    run.flush()
    run.insert("stuvwx")
    run.flush()
    assert run.reach("ab") == (0, 2)
    lease = run.core.lease(run.ask(spell("ab"))._replace(load=False))
    assert isinstance(lease, Grant)
    run.perform(lease.plan)
    again = Running(run, lease.lease, SPACE, spell("ab"))  # computes them anew, for it wants no load
    run.running.add(again)
    again.compute(2 * run.page, True)
    assert again.commit(computed=False)
    below = enter(run, "abc")
    below.compute(3 * run.page)
    assert below.commit()
    run.complete(*backups(run))
    assert not list(run.in_flight(BackupStorage)), "a page that rests on a doubtful one would be stored"
    run.complete(*computing(run))
    assert reach(run, "abc") == 0
    below.release()
    again.release()
    run.settle()
    run.audit(idle=True)


@pytest.mark.parametrize("fails", [False, True], ids=["ran", "failed"])
def test_nothing_that_rests_on_the_state_of_a_batch_that_is_not_over_is_saved(fails: bool) -> None:
    """The pages between that state and what rests on it had been on the host for long."""
    run = runtime("full,mamba")
    run.insert("ab")
    run.flush()
    assert {kind for kind, _ in run.storage} == {FULL}
    state = publish(run, "a", fails=fails)
    below = enter(run, "abc")
    assert below.lease.cached == run.page, "it goes on from the state after the first page"
    below.compute(3 * run.page)
    assert below.commit(checkpoint=3 * run.page)
    run.complete(*backups(run))
    assert not run.in_flight(BackupStorage), "a page that rests on a doubtful state would be stored"
    run.complete(*computing(run))
    below.release()
    state.release()
    run.settle()
    assert reach(run, "abc") == (0 if fails else 3)
    assert ((MAMBA, run.chain(SPACE, spell("abc"))[-1]) in run.storage) is not fails
    run.audit(idle=True)


def test_pages_of_a_failed_batch_come_back_when_it_is_over_everywhere() -> None:
    run = runtime(device=8, host=0)
    publish(run, "abcd").release()
    run.tell(*computing(run))
    assert reach(run, "abcd") == 0
    assert run.lease(spell("uvwxyz")) is None, "some rank still writes to these pages"
    run.complete(*computing(run))
    other = run.lease(spell("uvwxyz"))
    assert other is not None
    other.release()
    assert is_empty(run)


def test_pages_of_a_batch_that_is_not_over_may_be_evicted_and_it_may_fail_after_that() -> None:
    run = runtime(device=8, host=0)
    publish(run, "abcd").release()
    publish(run, "abxy").release()
    other = run.lease(spell("uvwxyz"))
    assert other is not None
    assert reach(run, "abcd") <= 2
    for op in computing(run):
        run.complete(op)
    assert reach(run, "abcd") == reach(run, "abxy") == 0
    other.release()
    assert is_empty(run)


def test_the_lease_of_a_failed_batch_is_told_even_if_the_tree_had_all_its_pages() -> None:
    """Its next commit may rest on the same batch: the last page was begun in it."""
    run = runtime()
    one, two = enter(run, "abc"), enter(run, "abc")
    one.compute(3 * run.page)
    two.compute(3 * run.page, True)
    assert one.commit()
    assert two.commit(computed=False)
    run.complete(*computing(run))
    assert (one.lease.valid, two.lease.valid) == (None, 3 * run.page)
    assert reach(run, "abc") == 3
    one.release()
    two.release()


@pytest.mark.parametrize("filled", [SWA, MAMBA])
def test_a_cell_of_an_older_node_that_a_failed_batch_filled_is_not_served(filled: int) -> None:
    run = runtime("full,swa,mamba", host=0, window=8)
    if filled == MAMBA:
        run.insert("abcd")
        publish(run, "abcd").release()
    else:
        insert(run, "abcd")
        insert(run, "abcdef")
        for node in run.core.world.find(SPACE, spell("abcd"))[0]:  # the window goes, as under pressure
            run.core._transfers.room.evict(node, SWA)
        assert run.core.match(SPACE, spell("abcd")).full == 4 * run.page
        publish(run, "abcd").release()
    assert run.reach("abcd")[0] == 4
    run.complete(*computing(run))
    assert run.reach("abcd")[0] == 0
    run.settle()
    run.audit(idle=True)


def test_a_holder_goes_on_reading_what_it_holds_and_publishes_nothing_below_it() -> None:
    """Its pages are nobody else's before it lets go, not even when others need room."""
    run = runtime(device=8, host=0)
    publish(run, "abcd").release()
    holder = enter(run, "abcde")
    table = run.table(holder.lease, FULL)
    run.complete(*computing(run))
    assert holder.lease.valid == 0
    assert run.lease(spell("uvwxyz")) is None
    assert run.table(holder.lease, FULL) == table
    plan = run.core.advance(holder.lease, 5 * run.page)
    run.perform(plan)
    holder.release()
    assert is_empty(run)


def test_a_namespace_that_was_invalidated_meanwhile_still_tells_its_holders() -> None:
    run = runtime()
    publish(run, "abcd").release()
    holder = enter(run, "abcde")
    answer = run.core.invalidate(SPACE)
    run.perform(answer if isinstance(answer, Plan) else answer.plan)
    run.complete(*computing(run))
    assert holder.lease.valid == 0
    holder.release()
    run.settle()
    run.core.follow_up()
    run.audit(idle=True)


def test_what_was_cut_off_is_not_taken_for_what_is_computed_anew() -> None:
    """Both are below one parent and begin with the same page, for as long as somebody holds the old one."""
    run = runtime()
    run.insert("ab")
    publish(run, "abcd").release()
    holder = enter(run, "abcde")
    run.complete(*computing(run))
    run.insert("abcd")
    assert reach(run, "abcd") == 4
    assert len(run.published_on(Medium.GPU)) == 4
    held = run.table(holder.lease, FULL)
    fresh = enter(run, "abcde")
    assert run.table(fresh.lease, FULL)[:2] == held[:2]
    assert run.table(fresh.lease, FULL)[2:4] != held[2:4]
    for running in (holder, fresh):
        running.release()
    run.settle()
    run.audit(idle=True)
    assert reach(run, "abcd") == 4
    assert len(run.published_on(Medium.CPU)) == 4


def test_a_load_above_a_failed_batch_stays_as_it_is() -> None:
    run = runtime("full,swa", device=12, host=32, window=8)
    run.insert("abcdef")
    run.flush()
    run.insert("uvwxyzuvwxyz"[:11])
    run.flush()
    assert run.reach("abcdef") == (0, 6)
    holder = run.lease(spell("abcdefg"))
    assert holder is not None
    assert run.in_flight(LoadBack)
    one = publish(run, "abcdefgh")
    holder.release()
    run.complete(*computing(run))
    assert one.lease.valid == 6 * run.page
    one.release()
    run.settle()
    run.audit(idle=True)


def test_the_plan_of_a_commit_says_that_its_pages_are_being_computed_and_only_then() -> None:
    run = runtime()
    running = enter(run, "ab")
    running.compute(2 * run.page)
    assert running.commit()
    assert not computing(run)
    running.release()
    running = publish(run, "abcd", fails=False)
    assert len(computing(run)) == 1
    running.release(retire=True)
    assert not run.in_flight(Retire)
    run.settle()
    run.audit(idle=True)
