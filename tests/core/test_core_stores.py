"""What is stored and what is not: write-through, stores that come and go, pages that are offered again."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from asynccache.core import audit
from asynccache.core.cache import Access, Skip
from asynccache.core.ledger import BACKUP_HOST, CLONE, LOAD_BACK
from asynccache.core.plan import (
    MOST_BYTES,
    MOST_OPS,
    BackupHost,
    BackupStorage,
    Clone,
    Effect,
    LoadBack,
    Medium,
    Move,
    Publish,
    operations,
)
from asynccache.core.world import World
from tests.core.core_kit import COMPONENTS, copied, granted, insert, opened, runtime, saved, take, whole
from tests.simulated.fetching import open_fetch
from tests.simulated.synchronous import FULL, HASH, MAMBA, SPACE, SWA, SynchronousRuntime, core_config, spell

# Write-through: nodes that split while their backup is in flight, backups that fail, and what is published when.


def stored_events(effects: list[Effect], medium: Medium) -> list[Publish]:
    return [e for e in effects if isinstance(e, Publish) and e.medium is medium and e.stored]


def spelled(event: Publish) -> str:
    """The letters of an event's pages."""
    return "".join(chr(int.from_bytes(event.tokens[i : i + 4], "little")) for i in range(0, len(event.tokens), 16))


def stored(run: SynchronousRuntime, text: str, component: int = FULL) -> list[bool]:
    return [(component, digest) in run.storage for digest in run.chain(SPACE, spell(text))]


def assert_root_first(run: SynchronousRuntime, events: list[Publish]) -> None:
    """Each event's parent is the page before it; ``SynchronousRuntime`` has checked the hashes."""
    ends = {b"", SPACE}
    for event in events:
        assert event.parent in ends
        ends.add(event.hashes[-HASH:])


def test_nothing_is_published_or_stored_before_the_ack() -> None:
    run = runtime()
    run.insert("abcdefgh")
    assert stored_events(run.log, Medium.CPU) == []
    assert run.in_flight() == run.in_flight(BackupHost)
    run.complete(*run.in_flight(BackupHost))
    assert [spelled(e) for e in stored_events(run.log, Medium.CPU)] == ["abcdefgh"]
    assert stored_events(run.log, Medium.STORAGE) == []
    run.complete(*run.in_flight(BackupStorage))
    assert [spelled(e) for e in stored_events(run.log, Medium.STORAGE)] == ["abcdefgh"]
    assert stored(run, "abcdefgh") == [True] * 8


@pytest.mark.parametrize("components", COMPONENTS)
@pytest.mark.parametrize(
    ("splitters", "fragments"),
    [
        (["abcdX"], ["abcd", "efgh"]),
        (["abcdX", "abcdefY"], ["abcd", "ef", "gh"]),
        (["abX", "abcdefY", "abcdY"], ["ab", "cd", "ef", "gh"]),
        (["abcdX", "abY", "abcdefZ"], ["ab", "cd", "ef", "gh"]),
        (["abcdefgX", "aX"], ["a", "bcdefg", "h"]),
    ],
    ids=["once", "twice", "both halves, left to right", "both halves, middle first", "both ends"],
)
def test_every_fragment_is_published_root_first_and_stored(
    components: str, splitters: list[str], fragments: list[str]
) -> None:
    run = runtime(components, window=32)
    whole(run, "abcdefgh")
    backup = run.in_flight(BackupHost)
    insert(run, *splitters)
    assert stored_events(run.log, Medium.CPU) == []
    mark = len(run.log)
    run.complete(*backup)
    events = stored_events(run.log[mark:], Medium.CPU)
    assert [spelled(e) for e in events] == fragments
    assert_root_first(run, events)
    run.settle()
    assert stored(run, "abcdefgh") == [True] * 8
    if "swa" in components:
        assert stored(run, "abcdefgh", SWA) == [True] * 8
    if "mamba" in components:
        assert stored(run, "abcdefgh", MAMBA) == [False] * 7 + [True]
    for splitter in splitters:
        assert all(stored(run, splitter))


def test_what_was_doomed_with_the_backup_above_it_is_copied_again_before_it_is_evicted() -> None:
    run = runtime(device=8, host=64)
    run.insert("abcd")
    above = run.in_flight(BackupHost)
    run.insert("abcdefgh")
    below = [op for op in run.in_flight(BackupHost) if op not in above]
    run.fail(*above)
    run.complete(*below)
    assert run.lease(b"", new=4 * run.page) is None
    run.settle()
    assert run.lease(b"", new=4 * run.page) is not None
    assert run.core.statistics().lost_pages == 0
    assert run.reach("abcdefgh") == (4, 8)


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_failed_copy_of_a_split_node_publishes_nothing_and_is_made_again(components: str) -> None:
    run = runtime(components, window=32)
    run.insert("abcdefgh")
    backup = run.in_flight(BackupHost)
    insert(run, "abcdX", "abcdefY")
    run.fail(*backup)
    assert stored_events(run.log, Medium.CPU) == []
    run.settle()
    run.flush()
    for text in ("abcdefgh", "abcdX", "abcdefY"):
        assert all(stored(run, text))
        assert run.reach(text) == (len(text), len(text)) or "mamba" in components
    assert_root_first(run, stored_events(run.log, Medium.CPU))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_any_order_of_outcomes_with_any_one_failed_ends_well(order: tuple[int, ...], failing: int | None) -> None:
    """A child's waits for its parent's: then all three are published."""
    run = runtime()
    insert(run, "abcd", "abcdefgh", "abcdefghij")
    ops = run.in_flight(BackupHost)
    for i in order:
        (run.fail if i == failing else run.complete)(ops[i])
        assert i in order[-1:] or len(stored_events(run.log, Medium.CPU)) < 3
    if failing is None:
        assert [spelled(e) for e in stored_events(run.log, Medium.CPU)] == ["abcd", "efgh", "ij"]
    run.flush()
    assert all(stored(run, "abcdefghij"))
    assert_root_first(run, stored_events(run.log, Medium.CPU))


@pytest.mark.parametrize("components", COMPONENTS)
def test_what_a_node_gains_later_is_backed_up_alone(components: str) -> None:
    run = runtime(components, window=32)
    run.insert("abcdef")
    run.flush()
    mark = len(run.log)
    if "mamba" not in components:
        run.insert("abcdef")
        assert [e for e in run.log[mark:] if isinstance(e, (BackupHost, BackupStorage))] == []
        return
    run.insert("abcdef", checkpoint=6)
    run.flush()
    backups = [e for e in run.log[mark:] if isinstance(e, BackupHost)]
    stores = [e for e in run.log[mark:] if isinstance(e, BackupStorage)]
    assert [[move.component for move in e.moves] for e in backups] == [[MAMBA]]
    assert [[page.component for page in e.pages] for e in stores] == [[MAMBA]]


def test_auxiliary_components_are_stored_before_full() -> None:
    run = runtime("full,swa,mamba")
    run.insert("abcdef", checkpoint=6)
    run.flush()
    order = [[page.component for page in effect.pages] for effect in run.log if isinstance(effect, BackupStorage)]
    assert order == [sorted(components, reverse=True) for components in order] != []


# policies


def test_selective_backs_up_at_the_second_commit_that_passes() -> None:
    run = runtime(write_policy="write_through_selective")
    run.insert("abcd")
    assert run.in_flight() == []
    run.insert("abcd")
    assert len(run.in_flight(BackupHost)) == 1


def test_selective_counts_the_chunks_of_one_request_once() -> None:
    run = runtime(write_policy="write_through_selective")
    request = granted(run, "abcdefgh")
    for chunk in (8, 16, 24, 32):
        request.compute(chunk)
        assert request.commit()
    assert run.in_flight() == []
    request.release()
    saved(run, "abcdefghij")
    assert all(stored(run, "abcdefgh"))
    assert not any(stored(run, "abcdefghij")[8:])


def test_write_back_saves_the_coldest_below_the_watermark() -> None:
    run = runtime(device=20, host=64, write_policy="write_back", write_back_watermark=0.5)
    insert(run, "abcd", "efgh")
    assert run.in_flight() == []
    run.insert("ijkl")
    assert run.in_flight(BackupHost) != []
    run.settle()
    assert all(stored(run, "abcd"))
    assert not any(stored(run, "ijkl"))


def test_backups_beyond_the_limit_are_deferred_and_not_lost() -> None:
    run = runtime(max_backup_ops=2)
    insert(run, "ab", "cd", "ef", "gh", "ij")
    assert len(run.in_flight(BackupHost)) == 2
    run.settle()
    run.flush()
    for text in ("ab", "cd", "ef", "gh", "ij"):
        assert all(stored(run, text))


# Stores come and go: which pages count as stored, and which are stored again.


TEXT = "abcdefgh"


def flushed(run: SynchronousRuntime, *texts: str) -> SynchronousRuntime:
    """It has these texts, and has saved all that it can."""
    insert(run, *texts)
    run.flush()
    return run


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
    return sum(stored(run, text))


def test_without_a_store_nothing_is_stored_or_fetched_and_nothing_waits_for_it() -> None:
    run = flushed(runtime(storage=False), TEXT)
    assert not run.storage
    assert run.unsaved() == (0, 0)
    assert isinstance(open_fetch(run, spell(TEXT)), Skip)


def test_what_is_on_the_host_when_a_store_comes_is_stored_by_a_backfill() -> None:
    run = flushed(runtime(storage=False), TEXT, "abcdxyz", "abq")
    attach(run)
    assert run.unsaved() == (0, 8 + 3 + 1)
    assert fill(run) > 2
    assert [in_store(run, text) for text in (TEXT, "abcdxyz", "abq")] == [8, 7, 3]
    assert run.unsaved() == (0, 0)


def test_a_slice_of_a_backfill_keeps_to_its_limits() -> None:
    run = runtime(storage=False, device=400, host=400)
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
    run = flushed(runtime(storage=False), "abcd")
    attach(run)
    saved(run, TEXT)
    assert in_store(run) == 4
    run.flush()
    assert in_store(run) == 8


def test_a_store_that_is_only_read_is_given_nothing() -> None:
    run = runtime(storage=False)
    run.insert(TEXT)
    attach(run, Access.READ)
    run.flush()
    fill(run)
    assert not run.storage
    assert run.unsaved() == (0, 0)
    run.storage.update({(FULL, digest): digest for digest in run.chain(SPACE, spell("xyz"))})
    assert opened(run, "xyz").finish() == 3 * run.page


@pytest.mark.parametrize("under_way", [False, True])
def test_after_a_store_has_left_nothing_passes_for_stored(under_way: bool) -> None:
    """Nor what was under way to it."""
    run = runtime()
    stores = on_host(run, TEXT)
    assert stores
    if not under_way:
        run.complete(*stores)
    detach(run, Access.WRITE)
    if under_way:
        run.complete(*stores)
        run.storage.clear()
    assert run.unsaved() == (0, 8)
    run.flush()
    assert in_store(run) == 8
    assert run.unsaved() == (0, 0)


def test_what_was_being_fetched_from_it_does_not() -> None:
    run = flushed(runtime(), TEXT)
    other = SynchronousRuntime(run.config, storage=dict(run.storage))
    fetch = opened(other)
    assert fetch.take_full(8) == 8
    detach(other, Access.WRITE)
    assert fetch.finish() == 8 * other.page
    assert other.unsaved() == (0, 8)


def test_the_state_of_a_node_that_splits_keeps_its_meaning() -> None:
    run = flushed(runtime(), TEXT)
    detach(run, Access.WRITE)
    saved(run, "abcdx")
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
    random, run = Random(seed), runtime(storage=False, device=400, host=400)
    texts = ["".join(random.choice("ab") for _ in range(random.randint(4, 12))) for _ in range(12)]
    insert(run, *texts)
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
    run = flushed(runtime(storage=False), TEXT, "abq")
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
    run = flushed(runtime(storage=False), TEXT)
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


# Pages that storage did not take are offered again when it has taken others and is idle, and never many at once.


def on_host(run: SynchronousRuntime, text: str) -> list[int]:
    """Commit it and back it up; the operations that are to store it, and others."""
    copied(run, text)
    return run.in_flight(BackupStorage)


def away(texts: int = 20) -> SynchronousRuntime:
    """A store that has failed for so many texts."""
    run = runtime(device=256, host=256)
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


def test_a_store_that_is_still_away_is_not_tried_again() -> None:
    run = away()
    run.fail(*on_host(run, "abcd"))
    assert not run.in_flight(BackupStorage)


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


def test_what_is_a_burden_to_the_host_is_left_to_the_next_drain() -> None:
    run = runtime(device=16, host=16)
    run.fail(*on_host(run, "abcdefgh"))
    run.complete(*on_host(run, "ijkl"))
    assert not run.in_flight(BackupStorage)
    run.flush()
    assert run.unsaved() == (0, 0)


def test_what_has_left_the_host_meanwhile_is_forgotten() -> None:
    run = runtime(device=4, host=4)
    run.fail(*on_host(run, "abcd"))
    run.fail(*on_host(run, "efgh"))  # in its place
    run.complete(*on_host(run, "ijkl"))
    assert not run.in_flight(BackupStorage)


# Backups that a call decides in a row are one effect, which keeps its place among the copies and has a bound.


def move(component: int, *slots: int) -> Move:
    return Move(component, b"".join(slot.to_bytes(4, "little") for slot in slots), bytes(4 * len(slots)))


def backed_up(world: World, *moves: Move) -> int:
    op = world.ledger.open(BACKUP_HOST)
    world.backup(op, moves)
    return op.id


def test_backups_that_follow_each_other_are_one_effect_and_nothing_overtakes() -> None:
    world = World(core_config("full,swa,mamba"))
    first = [
        backed_up(world, move(0, 1, 2), move(1, 7)), backed_up(world, move(0, 3)), backed_up(world, move(1, 8))
    ]  # fmt: skip
    load = LoadBack(world.ledger.open(LOAD_BACK).id, (move(0, 4),))
    clone = Clone(world.ledger.open(CLONE).id, (move(2, 1),), load.op)
    world.copy(load)
    world.copy(clone)
    last = backed_up(world, move(0, 9))
    assert world.plan().effects == (
        BackupHost(tuple(first), (move(0, 1, 2, 3), move(1, 7, 8))), load, clone, BackupHost((last,), (move(0, 9),)),
    )  # fmt: skip
    assert world.plan().effects == (), "each plan begins with none"


def test_an_effect_has_a_bound() -> None:
    world = World(core_config())
    for _ in range(600):
        backed_up(world, move(0, *range(4)))
    assert [len(operations(effect)) for effect in world.plan().effects] == [MOST_OPS, MOST_OPS, 600 - 2 * MOST_OPS]
    for size in (600 << 10, MOST_BYTES, 1 << 10, 8, MOST_BYTES + 4, 8):
        backed_up(world, Move(0, bytes(size), bytes(size)))
    assert [len(operations(effect)) for effect in world.plan().effects] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 0, 1, 2])
def test_operations_of_one_effect_may_end_in_any_order_and_not_alike(
    order: tuple[int, ...], failing: int | None
) -> None:
    """Workers end them together. The core does not rely on that."""
    run = runtime("full,swa,mamba", write_policy="write_back", write_back_watermark=0)
    whole(run, "abcd", "abcdefgh", "abcdefghij", "XY")
    run.drain()
    (effect,) = [effect for effect in run.log if isinstance(effect, BackupHost)]
    ops = list(effect.ops)
    assert len(ops) > 2
    for i in order:
        (run.fail if i == failing else run.complete)(ops[i])
    run.flush()
    run.audit(idle=True)
    assert run.unsaved() == (0, 0)
    assert run.reach("abcdefghij") == (10, 10)


# write_back: nodes that a backup leaves out, because the host could never hold them, can still be evicted.


def test_a_leaf_that_was_left_out_of_its_paths_backup_waits_in_its_order() -> None:
    run = runtime(device=14, host=4, write_policy="write_back", write_back_watermark=0.8)
    first = granted(run, "abcdef", new=8)
    for pages in (3, 6):  # a node for each commit: the host can hold the first of them
        first.compute(pages * run.page)
        assert first.commit(pages * run.page)
    first.release()
    second = granted(run, "xyz")  # free pages are few now: backups of the coldest begin
    audit.check(run.core)
    run.flush()
    second.release()
    take(run, 14)
