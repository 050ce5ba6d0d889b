"""Stores come and go: which pages count as stored, and which are stored again."""

from __future__ import annotations

from random import Random

import pytest

from asynccache.core.cache import Access, Skip
from asynccache.core.plan import BackupStorage, Medium, Publish
from tests.simulated.fetching import Fetch, open_fetch
from tests.simulated.synchronous import FULL, SPACE, SynchronousRuntime, core_config, spell

TEXT = "abcdefgh"


def runtime(storage: bool = False, **options: object) -> SynchronousRuntime:
    return SynchronousRuntime(core_config(**{"device": 40, "host": 40, "storage": storage, **options}))  # type: ignore[arg-type]


def attach(run: SynchronousRuntime, access: Access = Access.WRITE) -> None:
    run.perform(run.core.attach_storage(access))


def detach(run: SynchronousRuntime, access: Access = Access.NONE) -> None:
    run.storage.clear()
    run.perform(run.core.detach_storage(access))


def fill(run: SynchronousRuntime, ops: int = 2, between: object = None) -> int:
    """A whole pass; how many slices it took."""
    backfill, slices, over = run.core.backfill(store=True), 0, False
    while not over:
        plan, over = backfill.some(ops, 100)
        assert sum(isinstance(effect, BackupStorage) for effect in plan.effects) <= ops + 1
        run.perform(plan)
        if callable(between):
            between(slices)
        run.settle()
        slices += 1
    return slices


def in_store(run: SynchronousRuntime, text: str = TEXT) -> int:
    return sum((FULL, digest) in run.storage for digest in run.chain(SPACE, spell(text)))


def test_without_a_store_nothing_is_stored_or_fetched_and_nothing_waits_for_it() -> None:
    run = runtime()
    run.insert(TEXT)
    run.flush()
    assert not run.storage
    assert run.unsaved() == (0, 0)
    assert isinstance(open_fetch(run, spell(TEXT)), Skip)


def test_what_is_on_the_host_when_a_store_comes_is_stored_by_a_backfill() -> None:
    run = runtime()
    for text in (TEXT, "abcdxyz", "abq"):
        run.insert(text)
    run.flush()
    attach(run)
    assert run.unsaved() == (0, 8 + 3 + 1)
    assert fill(run) > 2
    assert [in_store(run, text) for text in (TEXT, "abcdxyz", "abq")] == [8, 7, 3]
    assert run.unsaved() == (0, 0)


def test_a_slice_of_a_backfill_keeps_to_its_limits() -> None:
    run = runtime(device=400, host=400)
    for letter in "abcdefgh":
        run.insert(letter * 3)
    run.insert("i" * 30)
    run.flush()
    attach(run)
    backfill, sizes, over = run.core.backfill(store=True), [], False
    while not over:
        plan, over = backfill.some(16, 7)
        sizes.append([len(pages.slots) // 4 for effect in plan.effects if isinstance(effect, BackupStorage)
                      for pages in effect.pages])  # fmt: skip
        run.perform(plan)
        run.settle()
    assert sorted(map(sum, sizes)) == [6, 6, 6, 6, 30]


def test_what_is_committed_later_goes_there_by_itself() -> None:
    run = runtime()
    run.insert("abcd")
    run.flush()
    attach(run)
    run.insert(TEXT)
    run.settle()
    assert in_store(run) == 4
    run.flush()
    assert in_store(run) == 8


def test_a_store_that_is_only_read_is_given_nothing() -> None:
    run = runtime()
    run.insert(TEXT)
    attach(run, Access.READ)
    run.flush()
    fill(run)
    assert not run.storage
    assert run.unsaved() == (0, 0)
    run.storage.update({(FULL, digest): digest for digest in run.chain(SPACE, spell("xyz"))})
    fetch = open_fetch(run, spell("xyz"))
    assert isinstance(fetch, Fetch)
    assert fetch.finish() == 3 * run.page


def test_a_second_store_gets_what_the_first_has() -> None:
    run = runtime(storage=True)
    run.insert(TEXT)
    run.flush()
    assert in_store(run) == 8
    run.storage.clear()  # what follows is the second one's
    attach(run)
    fill(run)
    assert in_store(run) == 8


def test_after_a_store_has_left_nothing_passes_for_stored() -> None:
    run = runtime(storage=True)
    run.insert(TEXT)
    run.flush()
    detach(run, Access.WRITE)
    assert run.unsaved() == (0, 8)
    run.flush()
    assert in_store(run) == 8
    assert run.unsaved() == (0, 0)


def test_what_was_under_way_to_a_store_that_left_does_not_pass_for_stored_either() -> None:
    run = runtime(storage=True)
    run.insert(TEXT)
    run.complete(*run.in_flight())
    stores = run.in_flight(BackupStorage)
    assert stores
    detach(run, Access.WRITE)
    run.complete(*stores)
    run.storage.clear()
    assert run.unsaved() == (0, 8)
    run.flush()
    assert in_store(run) == 8


def test_what_was_being_fetched_from_it_does_not() -> None:
    run = runtime(storage=True)
    run.insert(TEXT)
    run.flush()
    other = SynchronousRuntime(run.config, storage=dict(run.storage))
    fetch = open_fetch(other, spell(TEXT))
    assert isinstance(fetch, Fetch)
    assert fetch.take_full(8) == 8
    detach(other, Access.WRITE)
    assert fetch.finish() == 8 * other.page
    assert other.unsaved() == (0, 8)


def test_the_state_of_a_node_that_splits_keeps_its_meaning() -> None:
    run = runtime(storage=True)
    run.insert(TEXT)
    run.flush()
    detach(run, Access.WRITE)
    run.insert("abcdx")
    run.settle()
    run.flush()
    assert run.unsaved() == (0, 0)
    run.insert("abz")
    assert run.unsaved() == (1, 0)
    run.flush()
    detach(run, Access.WRITE)
    assert run.unsaved() == (0, 8 + 1 + 1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.slow(0.7)
def test_a_backfill_misses_nothing_however_the_tree_changes_meanwhile(seed: int) -> None:
    """Also nodes that were split between two slices, above and below where the pass is."""
    random, run = Random(seed), runtime(device=400, host=400)
    texts = ["".join(random.choice("ab") for _ in range(random.randint(4, 12))) for _ in range(12)]
    for text in texts:
        run.insert(text)
    run.flush()
    attach(run)
    run.storage.clear()

    def disturb(number: int) -> None:
        text = random.choice(texts)[: random.randint(1, 8)] + "z" * random.randint(1, 3)
        run.insert(text)

    fill(run, 1, disturb)
    run.settle()
    assert [in_store(run, text) for text in texts] == [len(text) for text in texts]


def test_a_backfill_names_what_the_tree_knows() -> None:
    run = runtime(publish=True)
    run.insert(TEXT)
    run.insert("abq")
    run.flush()
    attach(run)
    run.log.clear()
    backfill = run.core.backfill(store=False)
    plan, over = backfill.some(4, 100)
    assert over
    named = b"".join(effect.hashes for effect in plan.effects if isinstance(effect, Publish))
    assert all(effect.medium is Medium.STORAGE for effect in plan.effects if isinstance(effect, Publish))
    assert len(named) == 32 * (8 + 1)
    assert not run.jobs


def test_a_dead_namespace_is_not_stored_again() -> None:
    run = runtime()
    run.insert(TEXT)
    run.flush()
    request = run.lease(spell(TEXT))
    attach(run)
    backfill = run.core.backfill(store=True)
    run.perform(run.core.invalidate(None))  # type: ignore[arg-type]
    plan, over = backfill.some(9, 100)
    run.perform(plan)
    run.settle()
    assert over
    assert not run.storage
    assert request is not None
    request.release()
    run.settle()
    run.audit(idle=True)
