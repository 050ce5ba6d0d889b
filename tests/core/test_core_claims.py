"""Claims: the pages that a prefetch brought stay on the host until its lease is granted, and block nobody for ever."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.cache import Begin, Grant
from asynccache.core.plan import BackupHost, BackupStorage, More, Wait
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import SPACE, SynchronousRuntime, core_config, spell

TEXTS = ("abcd", "efgh", "ijkl", "mnop")


def stored(components: str = "full", **options: Any) -> SynchronousRuntime:
    """A fresh process with this little room, whose store has every text."""
    first = SynchronousRuntime(core_config(components, device=256, host=256))
    for text in TEXTS:
        first.insert(text, checkpoint=4 if "mamba" in components else 0)
    first.flush()
    return SynchronousRuntime(core_config(components, **options), storage=first.storage)


def fetch(run: SynchronousRuntime, text: str, *holders: int, begin: Begin = Begin.NEXT) -> int:
    """Prefetch it for these; how many pages."""
    opened = open_fetch(run, spell(text), begin=begin)
    assert isinstance(opened, Fetch), opened
    return opened.finish(holders=holders) // run.page


def drop(run: SynchronousRuntime, *holders: int) -> None:
    for holder in holders:
        run.perform(run.core.release_claim(holder))


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba", "full,swa,mamba"])
def test_what_is_claimed_is_not_evicted(components: str) -> None:
    run = stored(components, host=8)
    fetch(run, "abcd", 1)
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)
    assert run.reach("efgh") == (0, 0)
    drop(run, 1)
    fetch(run, "efgh")
    fetch(run, "mnop")
    assert run.reach("abcd") == (0, 0)
    run.audit(idle=True)


def test_a_claim_of_what_is_there_already_is_as_good() -> None:
    run = stored(host=8)
    fetch(run, "abcd")
    run.perform(run.core.claim(1, SPACE, spell("abcdX")))
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)
    drop(run, 1)
    run.audit(idle=True)


def test_a_shared_page_stays_until_the_last_claim_is_dropped() -> None:
    run = stored(host=8)
    fetch(run, "abcd", 1, 2)
    drop(run, 1)
    for text in TEXTS[1:]:
        fetch(run, text)
    assert run.reach("abcd") == (0, 4)
    drop(run, 2, 2)
    run.audit(idle=True)


def test_a_claim_is_counted_right_when_its_node_splits() -> None:
    run = stored("full,swa,mamba", host=8)
    fetch(run, "abcd", 1)
    run.insert("abcx")
    run.settle()
    run.audit()
    assert run.core.statistics().splits == 1
    assert run.reach("abcd")[1] == 4
    drop(run, 1)
    run.audit(idle=True)


def test_a_prefetch_waits_for_room_that_is_claimed_and_holds_nothing() -> None:
    run = stored(host=6)
    fetch(run, "abcd", 1)
    assert open_fetch(run, spell("efgh")) == Wait()
    run.audit()
    drop(run, 1)
    assert fetch(run, "efgh") == 4
    run.audit(idle=True)


def test_what_a_prefetch_may_still_take_is_promised_to_it() -> None:
    run = stored(device=64, host=6)
    opened = open_fetch(run, spell("abcd"))
    assert isinstance(opened, Fetch)
    assert open_fetch(run, spell("efgh")) == Wait()
    run.insert("uvw")
    assert run.in_flight(BackupHost) == [], "a backup took the pages of a prefetch"
    assert opened.finish() == 16
    run.settle()
    run.audit(idle=True)


def test_one_that_waited_long_enough_takes_the_oldest_claims_that_no_lease_is_waiting_with() -> None:
    run = stored(host=12)
    for holder, text in enumerate(TEXTS[:3]):
        fetch(run, text, holder)
    run.core.confirm_claim(0, True)
    assert fetch(run, "mnop", begin=Begin.NOW) == 4
    assert [run.reach(text)[1] for text in TEXTS] == [4, 0, 4, 4]
    drop(run, 0, 1, 2)
    run.audit(idle=True)


def test_one_that_waited_long_enough_takes_what_it_can_get() -> None:
    run = stored(host=6)
    fetch(run, "abcd", 1)
    run.core.confirm_claim(1, True)
    assert fetch(run, "efgh", begin=Begin.NOW) == 2
    assert run.reach("abcd") == (0, 4)
    drop(run, 1)
    run.audit(idle=True)


def test_whose_turn_it_is_not_waits_although_there_is_room() -> None:
    run = stored()
    assert open_fetch(run, spell("efgh"), begin=Begin.LATER) == Wait()
    run.audit(idle=True)


def test_a_lease_takes_claims_before_an_only_copy_is_lost() -> None:
    run = stored(device=8, host=8)
    fetch(run, "abcd", 1)
    fetch(run, "efgh", 2)
    run.core.confirm_claim(1, True)
    run.core.confirm_claim(2, True)
    run.insert("stuvwxyz")
    assert run.in_flight() == []
    assert run.lease(spell("STUV")) is None
    assert run.in_flight(BackupHost), "the backup has no room, and the claims were kept"
    run.settle()
    request = run.lease(spell("STUV"))
    assert request is not None
    assert run.core.statistics().lost_pages == 0
    request.release()
    drop(run, 1, 2)
    run.settle()
    run.audit(idle=True)


@pytest.mark.parametrize("fetched", [("abcd", "efgh"), ("efgh", "abcd")], ids=" ".join)
def test_the_claim_of_the_request_that_came_last_goes_first(fetched: tuple[str, str]) -> None:
    run = stored(device=4, host=8)
    for text in fetched:
        fetch(run, text, 1 if text == "abcd" else 2)
    run.core.confirm_claim(1, True)
    run.core.confirm_claim(2, True)
    run.insert("stuv")
    assert run.lease(spell("STUV")) is None
    assert (run.reach("abcd")[1], run.reach("efgh")[1]) == (4, 0)
    drop(run, 1, 2)
    run.settle()
    run.audit(idle=True)


def test_an_invalidated_namespace_keeps_no_claims() -> None:
    run = stored(host=8)
    fetch(run, "abcd", 1)
    while isinstance(answer := run.core.invalidate(SPACE), More):
        run.perform(answer.plan)
    run.perform(answer)
    assert run.core.statistics().nodes == 0
    drop(run, 1)
    run.audit(idle=True)


# only copies


def test_a_lease_waits_while_the_host_is_full_of_pages_on_their_way_to_storage() -> None:
    run = SynchronousRuntime(core_config(device=8, host=4))
    run.insert("abcd")
    run.complete(*run.in_flight(BackupHost))
    assert run.in_flight(BackupStorage)
    run.insert("efgh")
    assert run.lease(spell("stuvwxyz")) is None
    run.settle()
    request = run.lease(spell("stuvwxyz"))
    assert request is not None
    assert run.core.statistics().lost_pages == 0
    request.release()
    run.settle()
    run.audit(idle=True)


def test_what_storage_has_is_not_backed_up_again_at_the_cost_of_waiting() -> None:
    run = stored(device=8, host=8)
    fetch(run, "abcd")
    request = run.lease(spell("abcd!"))
    assert request is not None
    run.settle()
    request.release()
    fetch(run, "efgh", 1)
    fetch(run, "ijkl", 2)
    assert run.reach("abcd") == (4, 4), "on the device alone by now"
    other = run.lease(spell("STUVWXYZ"))
    assert other is not None
    assert run.core.statistics().lost_pages == 0
    assert (run.reach("efgh")[1], run.reach("ijkl")[1]) == (4, 4)
    other.release()
    drop(run, 1, 2)
    run.settle()
    run.audit(idle=True)


def test_a_lease_waits_for_backups_rather_than_take_a_shorter_match() -> None:
    run = SynchronousRuntime(core_config(device=12, host=16, max_backup_ops=1, storage=False))
    run.insert("abcd")
    run.settle()
    push_out = run.lease(spell("z" * 12))
    assert push_out is not None
    push_out.release()
    run.insert("stuv")
    run.insert("wxyz")  # its backup must wait for the one before it
    assert run.reach("abcd") == (0, 4)
    ask = run.ask(spell("abcdX"))._replace(chunk=run.page)
    answer = run.core.lease(ask)
    assert isinstance(answer, Wait), "one page is free, so it computes again what the host has"
    run.perform(answer.plan)
    run.settle()
    answer = run.core.lease(ask)
    assert isinstance(answer, Grant)
    assert answer.lease.cached == 16
    run.perform(answer.plan)
    run.perform(run.core.release(answer.lease))
    run.settle()
    run.audit(idle=True)
