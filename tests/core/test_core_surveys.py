"""Questions to every node come in slices, and are right also when nodes leave between two."""

from __future__ import annotations

from asynccache.core.cache import Grant, LeaseRequest
from asynccache.core.passes import Listed, Listing
from asynccache.core.plan import Clone, Compute, More
from asynccache.core.settings import SLICE_STEPS
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell

TEXTS = 2 * SLICE_STEPS + 1


def wide(**options: int) -> SynchronousRuntime:
    """So many nodes that one slice does not do."""
    run = SynchronousRuntime(core_config(device=2 * TEXTS, host=64, publish=False, **options))  # type: ignore[arg-type]
    for i in range(TEXTS):
        answer = run.core.lease(LeaseRequest(SPACE, spell(chr(1000 + i)), 0, 4, 4))
        assert isinstance(answer, Grant)
        run.core.commit(answer.lease, spell(chr(1000 + i)), i.to_bytes(32, "little"))
        run.core.release(answer.lease)
    return run


def test_what_is_unsaved_is_counted_in_slices() -> None:
    survey = wide(write_policy="write_back").core.survey()  # type: ignore[arg-type]
    slices = 1
    while isinstance(answer := survey.unsaved(), More):
        slices += 1
    assert slices >= 3
    assert answer == (TEXTS, 0)


def listed(run: SynchronousRuntime, listing: Listing) -> Listed:
    while isinstance(answer := listing.some(), More):
        run.perform(answer.plan)
    return answer


def test_all_pages_are_listed_in_slices_also_those_that_leave_between_them() -> None:
    run = wide(write_policy="write_back")  # type: ignore[arg-type]
    listing = run.core.listing(SPACE)
    assert isinstance(listing.some(), More)
    while isinstance(run.core.invalidate(SPACE), More):
        pass
    answer = listed(run, listing)
    assert sorted(answer.hashes) == sorted(i.to_bytes(32, "little") for i in range(TEXTS))
    assert answer.writes == set()
    assert listed(run, run.core.listing(b"other".ljust(32))) == ([], set())


def test_pages_of_a_batch_that_fails_while_they_are_listed_are_on_the_list() -> None:
    """A backup may have written them already."""
    run = SynchronousRuntime(core_config())
    batch = run.lease(spell("abcd"))
    assert batch is not None
    batch.compute(4 * run.page, True)
    assert batch.commit(computed=False)
    listing = run.core.listing(SPACE)
    run.tell(*run.in_flight(Compute))
    assert len(listed(run, listing).hashes) == 4
    batch.release()
    run.settle()
    run.audit(idle=True)


def test_a_walk_visits_the_upper_piece_of_a_node_that_splits_though_the_lower_one_leaves() -> None:
    run = SynchronousRuntime(core_config(device=32, host=0))
    run.insert("abcdef")
    run.settle()
    survey = run.core.survey()  # the walk has found the node, and has not visited it
    run.insert("abcX")
    run.settle()
    lower = run.core.world.find(SPACE, spell("abcdef"))[0][-1]
    run.core._transfers.room.evict(lower, 0)
    upper = run.core.world.find(SPACE, spell("abcdef"))[0]
    assert [node.end for node in upper] == [3]
    assert survey.unsaved() == (4, 0)
    run.core.world.plan()


def test_a_probe_copies_nothing() -> None:
    run = SynchronousRuntime(core_config("full,mamba"))
    run.insert("abcd", checkpoint=4)
    run.settle()
    ask = run.ask(spell("abcdX"))
    for load, clones in ((False, 0), (True, 1)):
        answer = run.core.lease(ask._replace(load=load))
        assert isinstance(answer, Grant)
        assert answer.lease.cached == 16
        assert sum(isinstance(effect, Clone) for effect in answer.plan.effects) == clones
        run.perform(answer.plan)
        run.settle()
        run.perform(run.core.release(answer.lease))
    run.settle()
    run.audit(idle=True)
