"""Calls that meet what others hold: pinned nodes, pages that are loaded or saved just now, checkpoints, splits."""

from __future__ import annotations

import pytest

from asynccache.core.cache import Grant, LeaseRequest, Skip
from asynccache.core.plan import BackupHost, Clone, LoadBack, More, Status
from tests.simulated.synchronous import MAMBA, SPACE, Running, Slots, SynchronousRuntime, core_config, spell


def runtime(components: str = "full", **options: object) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(components, **options))  # type: ignore[arg-type]


def granted(run: SynchronousRuntime, text: str, new: int = 0, **options: object) -> Running:
    request = run.lease(spell(text), new, **options)  # type: ignore[arg-type]
    assert request is not None
    return request


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
    request.release()
    run.settle()
    run.audit(idle=True)


def test_invalidating_a_namespace_ends_however_much_of_it_is_pinned() -> None:
    run = runtime(device=1024, host=0, slice_steps=32)  # fewer than there are pinned nodes
    held = []
    for i in range(40):
        request = granted(run, chr(300 + i) + "x")
        request.compute(8)
        assert request.commit()
        held.append(request)
    run.insert("unpinned")
    for _ in range(10):
        answer = run.core.invalidate(None)
        if not isinstance(answer, More):
            break
        run.perform(answer.plan)
    assert not isinstance(answer, More)
    run.perform(answer)
    assert run.core.statistics().nodes == 40
    for request in held:
        request.release()
    run.settle()
    run.audit(idle=True)


def test_a_commit_waits_for_window_pages_that_are_being_loaded() -> None:
    run = runtime("full,swa", device=24, host=64, window=8)
    late = granted(run, "abcd")
    late.compute(16)
    run.insert("abcdefgh")
    run.flush()
    long = granted(run, "abcdefghi")  # pins FULL of it all, and the window at its end
    ask = LeaseRequest(SPACE, spell("x"), 0, 4, 17 * run.page)  # takes the other window pages, and nothing of FULL
    greedy = run.core.lease(ask)
    assert isinstance(greedy, Grant)
    run.perform(greedy.plan)
    run.perform(run.core.release(greedy.lease))
    other = granted(run, "abcde")
    loads = run.in_flight(LoadBack)
    assert loads
    assert other.lease.cached == 16
    assert not late.commit()
    run.fail(*loads)
    assert late.commit()
    late.release()
    other.release()
    long.release()
    run.settle()
    run.audit(idle=True)


def test_a_clone_outlives_the_failed_load_of_its_source() -> None:
    run = runtime("full,mamba", device=16, host=8, states=4)
    run.insert("ab", checkpoint=2)
    run.insert("abcd", checkpoint=4)
    run.flush()
    everything = run.lease(b"", new=16 * run.page, states=4)
    assert everything is not None
    everything.release()
    assert run.reach("abcd") == (0, 4)
    request = granted(run, "abcde")
    load, clone = run.in_flight(LoadBack)[0], run.in_flight(Clone)[0]
    run.fail(load)
    request.release()
    for i in range(4):
        text = "".join(chr(400 + 4 * i + j) for j in range(4))
        run.insert(text)
        for op in run.in_flight():
            if op != clone:
                run.complete(op)
    assert run.reach("abcd")[1] <= 4
    run.complete(clone, status=Status.FAILED)
    run.settle()
    run.audit(idle=True)


def test_a_shorter_match_is_not_granted_while_a_longer_one_waits_for_a_backup() -> None:
    run = runtime(
        "full,mamba", device=16, states=4, storage=False, write_policy="write_back", write_back_watermark=0.0
    )
    run.insert("abcd", checkpoint=4)
    run.flush()
    everything = run.lease(b"", new=16 * run.page, states=4)
    assert everything is not None
    everything.release()
    run.insert("ab", checkpoint=2)
    run.drain()
    run.fail(*run.in_flight(BackupHost))  # so the state at 2 may be dropped without waiting
    run.settle()
    run.insert("wxyz", checkpoint=4)  # and this one not
    assert run.lease(spell("abcde"), states=3) is None
    run.settle()
    request = granted(run, "abcde", states=3)
    assert request.lease.cached == 16
    run.settle()
    request.release()
    run.settle()
    run.audit(idle=True)


def test_a_state_that_a_stored_prefix_gains_after_a_split_is_stored_too() -> None:
    run = runtime("full,mamba")
    run.insert("abcd", checkpoint=4)
    run.flush()
    run.insert("ab", checkpoint=2)
    run.flush()
    chain = run.chain(SPACE, spell("ab"))
    assert (MAMBA, chain[1]) in run.storage


def test_a_prefetch_gives_up_where_its_anchor_cannot_be_backed_up() -> None:
    run = runtime()
    run.insert("ab")
    run.fail(*run.in_flight(BackupHost))
    run.settle()
    assert isinstance(run.core.prefetch_open(SPACE, spell("abcdefgh")), Skip)
