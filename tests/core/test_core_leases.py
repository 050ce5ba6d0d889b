"""Leases: all or nothing, and what calls meet that others hold."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.cache import Skip
from asynccache.core.plan import BackupHost, BackupStorage, Compute, LoadBack, Medium, Plan, Retire, Wait
from asynccache.errors import CacheFull
from tests.core.core_kit import COMPONENTS, clear_device, forget, granted, insert, leased, runtime, saved, whole
from tests.simulated.synchronous import FULL, MAMBA, SPACE, SWA, Running, Slots, SynchronousRuntime, spell

# Leases: all or nothing, pins, splits under a pin, private copies, commits, duplicates, early release, load_back.


def evicted(components: str = "full", **options: Any) -> SynchronousRuntime:
    """Eight pages that only the host has."""
    run = runtime(components, **({"device": 16, "host": 64, "states": 4} | options))
    whole(run, "abcdefgh")
    clear_device(run)
    assert run.reach("abcdefgh") == (0, 8)
    return run


# all or nothing


def test_what_can_never_fit_is_refused_at_once() -> None:
    run = runtime(device=8)
    with pytest.raises(CacheFull):
        run.lease(spell("abcdefgh"), new=4)


def test_a_release_tells_that_pages_are_free_and_a_second_one_does_nothing() -> None:
    run = runtime()
    request = granted(run, "abc")
    assert run.core.release(request.lease).freed
    assert run.core.release(request.lease) == Plan()


# pins and splits


def test_a_swa_pin_covers_the_window_and_no_more() -> None:
    run = runtime("full,swa", window=8, device=16, host=0)
    insert(run, "abcd", "abcdefgh")
    reader = granted(run, "abcdefghX")
    table = run.table(reader.lease, SWA)
    assert all(slot >= 0 for slot in table[6:8])
    swa = run.lease(spell("qrstuv"))
    assert swa is not None, "SWA pages before the window are not pinned"
    reader.verify()


def test_a_fresh_leaf_is_cut_so_that_its_tail_is_one_window() -> None:
    run = runtime("full,swa", window=8)
    run.insert("abcdefghijkl")
    before = run.core.statistics().nodes
    assert before == 2
    granted(run, "abcdefghijklX")
    assert run.core.statistics().nodes == before


# commit


def test_a_commit_makes_pages_hit_and_keeps_a_partial_page_private() -> None:
    run = runtime()
    request = granted(run, "abcd", new=8)
    request.compute(14)
    assert request.commit()
    assert request.lease.length == 12
    assert run.reach("abcd") == (3, 3)
    request.compute(16)
    assert request.commit()
    assert run.reach("abcd") == (4, 4)


def test_pages_of_a_window_that_a_commit_cannot_use_retire() -> None:
    run = runtime("full,swa", device=16, host=0)
    request = leased(run, "abcdef", chunk_swa=5 * run.page)
    free = run.core.statistics().device[1].free
    assert request.commit(6 * run.page)
    assert run.core.statistics().device[1].free == free, "the engine may still use them"
    run.complete(*run.in_flight(Retire))
    assert run.core.statistics().device[1].free == free + 1


def test_a_release_may_retire_its_own_pages() -> None:
    run = runtime(device=8)
    request = granted(run, "abcd", new=4)
    request.release(retire=True)
    assert run.lease(b"", new=16) is None
    run.complete(*run.in_flight(Retire))
    assert run.lease(b"", new=32) is not None


def test_commit_waits_for_pages_on_their_way_that_it_does_not_hold() -> None:
    run = evicted(device=32)
    writer = run.lease(spell("abcdefgh"), limit=0)
    reader = granted(run, "abcdefghX")
    assert writer is not None
    writer.compute(32)
    answer = run.core.commit(writer.lease, writer.key, run.hashes(writer.space, writer.key))
    assert isinstance(answer, Wait)
    assert set(answer.ops) == set(run.in_flight(LoadBack))
    run.perform(answer.plan)
    run.settle()
    assert writer.commit()
    reader.verify()
    writer.verify()


# early release


def test_advance_gives_back_what_left_the_window() -> None:
    run = runtime("full,swa", window=8)
    request = granted(run, "abcdefghijkl")
    request.compute(24)
    request.advance(24)
    table = run.table(request.lease, SWA)
    assert [slot < 0 for slot in table[:6]] == [True] * 3 + [False] * 3, "one page of margin stays"
    request.compute(48)
    assert request.commit()
    assert run.reach("abcdefghijkl")[0] == 12


def test_advance_keeps_full_pinned_and_lets_swa_of_the_match_go() -> None:
    run = runtime("full,swa", window=8, device=32, host=0)
    run.insert("abcdefgh")
    reader = granted(run, "abcdefghX", new=64)
    reader.compute(36)
    before = run.core.statistics().device
    reader.advance(36 + 60)
    after = run.core.statistics().device
    assert after[0] == before[0]
    assert after[1].evictable == before[1].evictable + 2


def test_truncate_gives_back_rejected_tokens() -> None:
    run = runtime()
    request = granted(run, "abcd", new=16)
    free = run.core.statistics().device[0].free
    run.perform(run.core.truncate(request.lease, 17))
    assert request.lease.reserved == 20
    assert run.core.statistics().device[0].free == free + 3


def test_extend_grows_or_says_full_and_changes_nothing() -> None:
    run = runtime(device=8)
    request = granted(run, "abcd")
    run.perform(run.core.extend(request.lease, 24, 24))  # type: ignore[arg-type]
    assert request.lease.reserved == 24
    before = run.core.statistics()
    assert isinstance(run.core.extend(request.lease, 36, 36), Wait)
    assert run.core.statistics() == before


# MAMBA


def test_a_second_checkpoint_for_the_same_end_comes_back() -> None:
    run = runtime("full,mamba")
    run.insert("abcd", checkpoint=4)
    run.settle()
    request = granted(run, "abcdX", states=3)
    run.settle()
    request.compute(20)
    slots = set(Slots.of(request.lease.states))
    assert request.commit(checkpoint=16)
    assert set(Slots.of(request.lease.states)) == slots, "the slot stays with the lease"
    assert request.commit(checkpoint=20)
    assert len(Slots.of(request.lease.states)) == 2


# load_back


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_load_brings_what_the_match_needs(components: str) -> None:
    run = evicted(components, window=8)
    request = granted(run, "abcdefghX")
    assert (request.lease.cached, request.lease.loaded_tokens) == (32, 32)
    (load,) = run.in_flight(LoadBack)
    effect = run.jobs[load].effect
    assert isinstance(effect, LoadBack)
    sizes = {move.component: len(move.src) // 4 for move in effect.moves}
    assert sizes == {0: 8} | ({SWA: 2} if "swa" in components else {}) | ({MAMBA: 1} if "mamba" in components else {})
    run.settle()
    assert request.ready
    request.verify()


def test_a_failed_load_tells_every_lease_how_much_is_good() -> None:
    run = evicted(device=32)
    one, two = granted(run, "abcdefghX"), granted(run, "abcdY")
    run.fail(*run.in_flight(LoadBack))
    assert (one.lease.valid, two.lease.valid) == (0, 0)
    one.release()
    two.release()
    run.audit(idle=True)
    again = granted(run, "abcdefghX")
    run.settle()
    again.verify()


def test_a_minimum_worth_loading_never_holds_back_swa_or_mamba() -> None:
    run = evicted("full", load_back_threshold=1000)
    assert granted(run, "abcdefghX").lease.cached == 0
    run = evicted("full,mamba", load_back_threshold=1000)
    assert granted(run, "abcdefghX").lease.cached == 32


# hints, namespaces, misuse


def test_an_ended_conversation_goes_first_although_it_waits_in_an_order_already() -> None:
    run = runtime(device=12, host=0)
    insert(run, "abcd", "wxyz")
    request = granted(run, "wxyzX")
    request.release(ended=True)
    granted(run, "stuvwX")
    assert run.reach("wxyz")[0] < 4
    assert run.reach("abcd") == (4, 4)


def test_an_ended_conversation_leaves_the_host_first_too() -> None:
    run = runtime(device=8, host=12)
    saved(run, "abcd", "efgh", "wxyz")
    request = granted(run, "wxyzX")
    request.release(ended=True)
    saved(run, "stuv", "mnop")
    assert run.reach("wxyz")[1] < 4
    assert run.reach("efgh")[1] == 4


def test_invalidate_forgets_a_namespace_and_lets_leases_finish() -> None:
    run = runtime()
    other = b"other".ljust(32)
    run.insert("abcd", space=other)
    run.insert("abcd")
    reader = granted(run, "abcdX")
    forget(run, reader.space)
    assert run.reach("abcd") == (0, 0)
    assert run.reach("abcd", other) == (4, 4)
    reader.verify()
    reader.compute(20)
    assert reader.commit()
    reader.release()
    assert run.reach("abcdX") == (0, 0)
    run.insert("abcd")
    assert run.reach("abcd") == (4, 4)


# Calls that meet what others hold: pinned nodes, pages that are loaded or saved just now, checkpoints, splits.


def test_a_checkpoint_that_is_not_the_leases_own_changes_nothing() -> None:
    run = runtime("full,mamba")
    request = granted(run, "abcd")
    request.compute(8)
    given = Slots.of(request.lease.states)[-1]
    assert request.commit(checkpoint=8)
    before = run.core.statistics()
    with pytest.raises(ValueError, match="checkpoint: slot=2 is not one"):
        run.core.commit(request.lease, spell("abcd"), b"", (16, given))
    run.audit()
    assert run.core.statistics() == before


def test_a_commit_waits_for_window_pages_that_are_being_loaded() -> None:
    run = runtime("full,swa", device=24, host=64, window=8)
    late = granted(run, "abcd")
    late.compute(16)
    run.insert("abcdefgh")
    run.flush()
    granted(run, "abcdefghi")  # pins FULL of it all, and the window at its end
    leased(run, "x", reserve_swa=17 * run.page).release()  # takes the other window pages, and nothing of FULL
    other = granted(run, "abcde")
    loads = run.in_flight(LoadBack)
    assert loads
    assert other.lease.cached == 16
    assert not late.commit()
    run.fail(*loads)
    assert late.commit()


def test_a_shorter_match_is_not_granted_while_a_longer_one_waits_for_a_backup() -> None:
    run = runtime(
        "full,mamba", device=16, states=4, storage=False, write_policy="write_back", write_back_watermark=0.0
    )
    run.insert("abcd", checkpoint=4)
    clear_device(run)
    run.insert("ab", checkpoint=2)
    run.drain()
    run.fail(*run.in_flight(BackupHost))  # so the state at 2 may be dropped without waiting
    run.settle()
    run.insert("wxyz", checkpoint=4)  # and this one not
    assert run.lease(spell("abcde"), states=3) is None
    run.settle()
    request = granted(run, "abcde", states=3)
    assert request.lease.cached == 16


def test_a_prefetch_gives_up_where_its_anchor_cannot_be_backed_up() -> None:
    run = runtime()
    run.insert("ab")
    run.fail(*run.in_flight(BackupHost))
    run.settle()
    assert isinstance(run.core.prefetch_open(SPACE, spell("abcdefgh")), Skip)


def test_a_commit_waits_for_a_load_that_is_doomed_and_keeps_its_own_page() -> None:
    """The load above it has failed already, so what it brings will not be there."""
    run = evicted(device=32)
    writer = granted(run, "abcdefgh", limit=0)
    writer.compute(8 * run.page)
    granted(run, "abcdX")
    granted(run, "abcdefghX")
    upper, lower = run.in_flight(LoadBack)
    run.fail(upper)
    assert not writer.commit()
    run.complete(lower)
    assert writer.commit()
    assert run.reach("abcdefgh") == (8, 8)


# What a batch did not compute is not there: it leaves the tree with all that hangs below it, and is neither saved nor
# announced; who holds some of it is told, and keeps it until the end.


def enter(run: SynchronousRuntime, text: str) -> Running:
    running = granted(run, text)
    run.complete(*[op for op in running.lease.loads if op in run.jobs])
    return running


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


def is_empty(run: SynchronousRuntime) -> bool:
    """Whether nothing is left: no page on any tier, and nothing in flight."""
    run.settle()
    run.audit(idle=True)
    shelves = run.core.statistics()
    return all(shelf.free == shelf.capacity for shelf in (*shelves.device, *shelves.host))


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_failed_batch_takes_what_it_published_and_all_below_it_out_of_the_tree(components: str) -> None:
    """In between the node was split, and another request has committed below both pieces."""
    run = runtime(components, window=4)
    whole(run, "ab")
    first = publish(run, "abcdef")
    other = enter(run, "abcxyz")
    assert other.lease.cached == (2 if MAMBA in run.kinds else 3) * run.page
    other.compute(6 * run.page)
    assert other.commit()
    last = enter(run, "abcdefg")
    last.compute(7 * run.page)
    assert last.commit()
    run.tell(*computing(run))
    assert run.reach("abcdefg")[1] == run.reach("abcxyz")[1] == 2
    assert {running.lease.valid for running in (first, last)} == {2 * run.page}
    assert len(run.published_on(Medium.GPU)) == 2
    for running in (first, other, last):
        running.release()
    run.settle()
    run.audit(idle=True)
    assert run.reach("abcdefg")[1] == 2
    assert len(run.published_on(Medium.CPU)) == len(run.published_on(Medium.STORAGE)) == 2
    assert {digest for kind, digest in run.storage if kind == FULL} == set(run.chain(SPACE, spell("ab")))


@pytest.mark.parametrize("acked", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fails", [False, True], ids=["ran", "failed"])
@pytest.mark.parametrize("components", COMPONENTS)
def test_a_backup_counts_only_if_the_batch_ran_whichever_is_known_first(
    components: str, fails: bool, acked: bool
) -> None:
    run = runtime(components, window=4)
    publish(run, "abc", fails=fails).release()
    for ops in ((computing, backups) if acked else (backups, computing)):
        run.complete(*ops(run))
        if ops is backups and not acked:
            assert not run.published_on(Medium.CPU)
            assert not run.in_flight(BackupStorage)
    run.settle()
    assert bool(run.storage) is bool(run.published_on(Medium.CPU)) is not fails
    assert run.reach("abc")[1] == (0 if fails else 3)
    if fails:
        assert is_empty(run)


def backups(run: SynchronousRuntime) -> list[int]:
    return run.in_flight(BackupHost)


def test_pages_below_a_batch_that_is_not_over_are_not_saved_either() -> None:
    """Its own pages had a copy on the host before, so no backup of them comes first."""
    run = runtime(device=8, host=16)
    run.insert("ab")
    clear_device(run)
    assert run.reach("ab") == (0, 2)
    again = leased(run, "ab", load=False)  # computes them anew
    again.compute(2 * run.page, True)
    assert again.commit(computed=False)
    below = enter(run, "abc")
    below.compute(3 * run.page)
    assert below.commit()
    run.complete(*backups(run))
    assert not list(run.in_flight(BackupStorage)), "a page that rests on a doubtful one would be stored"
    run.complete(*computing(run))
    assert run.reach("abc")[1] == 0


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
    assert run.reach("abc")[1] == (0 if fails else 3)
    assert ((MAMBA, run.chain(SPACE, spell("abc"))[-1]) in run.storage) is not fails


def test_pages_of_a_failed_batch_come_back_when_it_is_over_everywhere() -> None:
    run = runtime(device=8, host=0)
    publish(run, "abcd").release()
    run.tell(*computing(run))
    assert run.reach("abcd")[1] == 0
    assert run.lease(spell("uvwxyz")) is None, "some rank still writes to these pages"
    run.complete(*computing(run))
    other = granted(run, "uvwxyz")
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
    assert run.reach("abc")[1] == 3


@pytest.mark.parametrize("filled", [SWA, MAMBA])
def test_a_cell_of_an_older_node_that_a_failed_batch_filled_is_not_served(filled: int) -> None:
    run = runtime("full,swa,mamba", host=0)
    if filled == MAMBA:
        run.insert("abcd")
        publish(run, "abcd").release()
    else:
        whole(run, "abcd", "abcdef")
        for node in run.core.world.find(SPACE, spell("abcd"))[0]:  # the window goes, as under pressure
            run.core._transfers.room.evict(node, SWA)
        assert run.core.match(SPACE, spell("abcd")).full == 4 * run.page
        publish(run, "abcd").release()
    assert run.reach("abcd")[0] == 4
    run.complete(*computing(run))
    assert run.reach("abcd")[0] == 0


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
    run.perform(run.core.advance(holder.lease, 5 * run.page))
    holder.release()
    assert is_empty(run)


def test_a_namespace_that_was_invalidated_meanwhile_still_tells_its_holders() -> None:
    run = runtime()
    publish(run, "abcd").release()
    holder = enter(run, "abcde")
    forget(run, SPACE)
    run.complete(*computing(run))
    assert holder.lease.valid == 0
    holder.release()
    run.settle()
    run.core.follow_up()


def test_a_backup_that_saves_computed_pages_as_well_waits_for_the_batch_below_them() -> None:
    """Written back under pressure, the leaf and the page above it go to the host in one operation."""
    run = runtime(device=8, host=16, write_policy="write_back", write_back_watermark=0.0)
    run.insert("ab")
    publish(run, "abc").release()
    run.lease(spell("uvwxyz"))
    run.complete(*backups(run))
    assert not run.in_flight(BackupStorage), "a page that nobody may have computed would be stored"
    run.complete(*computing(run))
    assert run.reach("abc")[1] == 2
