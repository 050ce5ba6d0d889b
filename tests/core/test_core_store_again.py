"""Pages that storage did not take are offered again when it has taken others and is idle, and never many at once."""

from __future__ import annotations

from asynccache.core.plan import BackupHost, BackupStorage
from tests.simulated.synchronous import SynchronousRuntime, core_config


def on_host(run: SynchronousRuntime, text: str) -> list[int]:
    """Commit it and back it up; the operations that are to store it, and others."""
    run.insert(text)
    run.complete(*run.in_flight(BackupHost))
    return run.in_flight(BackupStorage)


def away(texts: int = 20) -> SynchronousRuntime:
    """A store that has failed for so many texts."""
    run = SynchronousRuntime(core_config(device=256, host=256))
    for i in range(texts):
        run.fail(*on_host(run, chr(65 + i) * 4))
        assert not run.in_flight(BackupStorage), "it is not tried again at once"
    return run


def test_a_store_that_is_back_gets_what_it_missed_a_few_at_a_time() -> None:
    run = away()
    run.complete(*on_host(run, "abcd"))
    rounds = 0
    while again := run.in_flight(BackupStorage):
        assert len(again) * 4 <= 256 // 16, "a sixteenth of the host at a time"
        run.complete(*again)
        rounds += 1
    assert rounds == 5
    assert run.unsaved() == (0, 0)
    run.settle()
    run.audit(idle=True)


def test_a_host_of_few_pages_gets_stored_again_too() -> None:
    run = SynchronousRuntime(core_config(device=16, host=8))
    run.fail(*on_host(run, "ab"))
    run.complete(*on_host(run, "cd"))
    assert len(run.in_flight(BackupStorage)) == 1
    run.settle()
    assert run.unsaved() == (0, 0)
    run.audit(idle=True)


def test_a_store_that_is_still_away_is_not_tried_again() -> None:
    run = away()
    run.fail(*on_host(run, "abcd"))
    assert not run.in_flight(BackupStorage)
    run.settle()
    run.audit(idle=True)


def test_what_goes_wrong_again_waits_for_the_next_success() -> None:
    run = away(3)
    run.complete(*on_host(run, "abcd"))
    run.fail(*run.in_flight(BackupStorage))
    assert not run.in_flight(BackupStorage)
    run.complete(*on_host(run, "efgh"))
    assert len(run.in_flight(BackupStorage)) == 3
    run.settle()
    assert run.unsaved() == (0, 0)


def test_nothing_is_tried_again_while_storage_is_busy() -> None:
    run = away(3)
    first = on_host(run, "abcd")
    second = [op for op in on_host(run, "efgh") if op not in first]
    run.complete(*first)
    assert run.in_flight(BackupStorage) == second
    run.complete(*second)
    assert len(run.in_flight(BackupStorage)) == 3
    run.settle()
    run.audit(idle=True)


def test_what_is_a_burden_to_the_host_is_left_to_the_next_drain() -> None:
    run = SynchronousRuntime(core_config(device=16, host=16))
    run.fail(*on_host(run, "abcdefgh"))
    run.complete(*on_host(run, "ijkl"))
    assert not run.in_flight(BackupStorage)
    run.flush()
    assert run.unsaved() == (0, 0)


def test_what_has_left_the_host_meanwhile_is_forgotten() -> None:
    run = SynchronousRuntime(core_config(device=4, host=4))
    run.fail(*on_host(run, "abcd"))
    run.fail(*on_host(run, "efgh"))  # in its place
    run.complete(*on_host(run, "ijkl"))
    assert not run.in_flight(BackupStorage)
    run.settle()
    run.audit(idle=True)
