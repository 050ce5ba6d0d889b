"""Eviction: what goes first, on the device and on the host, and what stays."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from asynccache.core.eviction import Order, withdraw
from asynccache.core.plan import BackupHost, BackupStorage, Medium, Publish, Status
from asynccache.core.room import Cost, Room, RoomMaker
from asynccache.core.tree import ABSENT, PRESENT, Node, Root
from asynccache.core.world import EARLY, LATE, World
from tests.core.core_kit import copied, granted, insert, reach, resized, runtime, saved, take, take_beside_full, whole
from tests.simulated.synchronous import MAMBA, SPACE, SWA, SynchronousRuntime, core_config, spell

# Eviction on the device: leaves go in the order of their last use, saved or not; what is dragged along, what is saved
# ahead, and what is never evicted.


def test_a_node_that_becomes_a_leaf_is_as_young_as_its_last_child() -> None:
    run = runtime(device=12, host=0)
    insert(run, "abcd", "wxyz", "abcdefgh")
    take(run, 8).release()
    assert reach(run, "abcd", "wxyz") == [4, 0]


def test_of_halves_that_are_equally_cold_the_deeper_one_goes_first() -> None:
    """A window is of no use without either of them."""
    run = runtime("full,swa", device=32, host=0, window=64)
    whole(run, "abcdefgh")
    run.insert("abcdefX")
    order = run.core.world.shelves[SWA].orders[LATE]
    assert [node.end for chunk in order.rest[0].chunks for node in chunk.nodes] == [8, 6, 7]


def test_nothing_is_evicted_in_vain() -> None:
    run = runtime(device=12, host=0)
    granted(run, "abcdefgh")
    run.insert("wxyz")
    assert run.lease(b"", new=5 * run.page) is None
    assert run.reach("wxyz")[0] == 4


def test_a_copy_that_can_wait_has_nothing_evicted_in_vain() -> None:
    """The first copy that would have to go may go, the second may not: storage lacks it. The first one went all the
    same, each time that the deferred backup was tried again, and a prefetch that hung its pages below it had it copied
    again, for ever."""
    run = runtime(device=32, host=8)
    saved(run, "abcd")
    copied(run, "efgh")
    run.fail(*run.in_flight(BackupStorage))
    saved(run, "ijklmn")
    assert on_host_of(run, "abcd", "efgh", "ijklmn") == [True, True, False]
    assert run.core.statistics().evicted_host == 0
    run.flush()
    run.settle()
    assert on_host_of(run, "abcd", "efgh", "ijklmn") == [False, False, True]


@pytest.mark.parametrize("stored", [False, True])
def test_what_can_wait_may_have_a_whole_path_evicted_or_nothing_of_it(stored: bool) -> None:
    run = runtime(device=32, host=8)
    for text, status in (("abcd", Status.DONE if stored else Status.FAILED), ("abcdefgh", Status.DONE)):
        copied(run, text)
        run.complete(*run.in_flight(BackupStorage), status=status)
    copied(run, "ijklmn")
    assert on_host_of(run, "abcd", "abcdefgh", "ijklmn") == [not stored, not stored, stored]


def test_the_coldest_leaf_goes_first_saved_or_not() -> None:
    run = runtime(device=12, host=64)
    run.insert("abcd")
    backup = run.in_flight(BackupHost)
    run.insert("efgh")
    run.complete(*[op for op in run.in_flight(BackupHost) if op not in backup])
    run.fail(*backup)
    take(run, 8)
    assert run.reach("abcd") == (0, 0), "nobody waits for a backup that has failed"
    assert run.reach("efgh") == (4, 4)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_what_is_saved_ahead_leaves_before_what_is_younger_and_stays_if_it_is_wanted(policy: str) -> None:
    run = runtime(device=12, host=8, write_policy=policy, write_back_watermark=0.5)
    saved(run, *(text for text in ("abcd", "efgh", "ijkl") for _ in range(2)))
    wanted = granted(run, "abcdX")
    cached = wanted.lease.cached // run.page
    wanted.release()
    run.settle()
    saved(run, "mnop")
    assert reach(run, "abcd", "efgh", "mnop") == [cached, 0, 4]
    assert cached >= 3


def test_dropping_an_only_copy_is_the_last_resort_and_counted() -> None:
    run = runtime(device=8, host=64)
    run.insert("abcdefgh")
    for _ in range(20):
        if run.lease(b"", new=32) is not None:
            break
        run.fail(*run.in_flight(BackupHost))
    assert run.core.statistics().lost_pages == 8


def test_copies_of_what_stays_on_the_device_leave_the_host_first() -> None:
    run = runtime(device=8, host=8, storage=False)
    saved(run, "abcd", "efgh")
    take(run, 4).release()
    assert (run.reach("abcd"), run.reach("efgh")) == ((0, 4), (4, 4))
    saved(run, "ijkl")
    assert (run.reach("abcd"), run.reach("ijkl")) == ((0, 4), (4, 4)), "what the device lacks is not given up"
    saved(run, "mnop")
    assert [run.reach(text)[1] for text in ("abcd", "efgh", "ijkl", "mnop")] == [4, 4, 4, 4], "both tiers are full"


def test_a_copy_of_what_stays_on_the_device_goes_before_what_the_device_lacks() -> None:
    run = runtime(device=12, host=8, storage=False)
    saved(run, "abcd", "efgh", "ijkl", "mnop")
    run.match(spell("efgh"))
    saved(run, "qrst")
    found = [run.reach(text) for text in ("abcd", "efgh", "ijkl", "mnop", "qrst")]
    assert found == [(0, 4), (4, 4), (0, 4), (4, 4), (4, 4)]


def test_what_is_saved_ahead_keeps_its_copy_until_it_has_left() -> None:
    run = runtime(device=16, host=8, storage=False, write_back_watermark=1.0)
    texts = ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx")
    saved(run, *texts)
    assert on_host_of(run, *texts) == [False, False, True, True, False, False]
    assert sum(len(effect.ops) for effect in run.log if isinstance(effect, BackupHost)) == 4, "each is copied once"


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("storage", [False, True])
@pytest.mark.slow(2)
def test_no_host_is_so_small_that_it_costs_hits(policy: str, storage: bool) -> None:
    """By .2 points at most, which are 4 of 2,000 pages."""
    hits = [revisits(host, policy, storage) for host in (0, 4, 8, 16, 32, 64)]
    assert all(more >= less - 4 for less, more in itertools.pairwise(hits)), hits
    if policy != "write_through_selective":
        assert hits[-1] > hits[0] + 100


def revisits(host: int, policy: str, storage: bool) -> int:
    """Pages found by 500 requests of four pages each, mostly for what was asked for before, and rather lately."""
    run, draws = runtime(device=32, host=host, write_policy=policy, storage=storage and host > 0), random.Random(1)
    run.audit = lambda idle=False: None  # type: ignore[method-assign]
    heads = [chr(256 + i) + second for i in range(40) for second in (chr(256 + i), "x")]
    texts = [head + tail for head in heads for tail in ("12", "34")]
    hits = 0
    for _ in range(500):
        at = min(len(texts) - 1, int(draws.expovariate(1 / 12)))
        text = texts.pop(at)
        texts.insert(0, text)
        hits += max(run.reach(text))
        saved(run, text)
    return hits


def test_a_copy_that_was_made_for_somebody_who_waits_is_not_given_up_for_one_that_can_wait() -> None:
    run = runtime(device=12, host=4)
    saved(run, "abcd")
    copied(run, "efgh")
    run.fail(*run.in_flight(BackupStorage))
    run.insert("ijkl")
    assert run.core.statistics().deferred_backups == 1
    assert run.lease(spell("mnop")) is None, "it waits until the host has abcd"
    run.complete(*run.in_flight(BackupHost))
    assert run.reach("abcd")[1] == 4
    assert run.lease(spell("mnop")) is not None


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 5, 39, 46, 65, 67])
def test_who_waits_alone_for_backups_gets_the_room_that_they_make(seed: int) -> None:
    """A copy that was made so that its device cell could go was given up for a copy that could have waited: then the
    request that waited had it made again, for ever."""
    draws, texts = random.Random(seed), [""]
    run = runtime("full,swa" if seed % 2 else "full,swa,mamba", device=24, host=16, states=8)
    run.audit = lambda idle=False: None  # type: ignore[method-assign]
    for number in range(120):
        works = number < 60
        start = draws.choice(texts) if draws.random() < 0.5 else ""
        fresh = "".join(chr(draws.randrange(300, 4000)) for _ in range(draws.randint(1, 12)))
        texts = [*texts, (start[: draws.randint(0, len(start))] + fresh)[:16]][-12:]
        if draws.random() < 0.3:
            run.perform(run.core.claim(number % 3, SPACE, spell(draws.choice(texts))))
        for _ in range(40):
            request = run.lease(spell(texts[-1]))
            if request is not None:
                break
            end_all(run, works)
        assert request is not None, f"request {number} waits for ever"
        run.complete(*[op for op in request.lease.loads if op in run.jobs])
        request.compute(len(texts[-1]) * run.page)
        assert request.commit()
        request.release()
        if draws.random() < 0.5:
            end_all(run, works)


def end_all(run: SynchronousRuntime, works: bool) -> None:
    """Everything in flight ends, and what it leads to; storage takes pages, or fails."""
    while run.jobs:
        op = run.in_flight()[0]
        fails = isinstance(run.jobs[op].effect, BackupStorage) and not works
        run.complete(op, status=Status.FAILED if fails else Status.DONE)


def on_host_of(run: SynchronousRuntime, *texts: str) -> list[bool]:
    """Whether an event said so of each, and none took it back."""
    return [run.published_on(Medium.CPU).issuperset(run.chain(SPACE, spell(text))) for text in texts]


def test_evicting_swa_drags_mamba_along() -> None:
    run = runtime("full,swa,mamba", device=12, host=0)
    whole(run, "abcd", "abcdefgh")
    run.settle()
    assert run.reach("abcdX") == (4, 4)
    granted(run, "abcdefghX")
    run.settle()
    free = run.core.statistics().device[MAMBA].free
    take_beside_full(run, swa=9)
    assert run.core.statistics().device[MAMBA].free == free + 1


def test_an_eviction_tells_that_pages_left_their_tier() -> None:
    run = runtime(device=8, host=8)
    saved(run, "abcdefgh")
    mark = len(run.log)
    take(run, 8)
    events = [e for e in run.log[mark:] if isinstance(e, Publish)]
    assert [(e.medium, e.stored) for e in events] == [(Medium.GPU, False)]
    assert run.published_on(Medium.GPU) == set()
    assert len(run.published_on(Medium.CPU)) == 8


def test_a_cell_that_was_used_since_it_began_to_wait_is_found_among_its_neighbours() -> None:
    """It waits by the stamp that it had before, so it is not where a search by the one that it has would look."""
    order = Order(0, 1)
    queue = order.rest[0]
    root = Root(SPACE, 1)
    nodes = [Node(bytes([number]) * 16, 4, root, 1) for number in range(9)]
    for number, node in enumerate(nodes):
        queue.put(10 * number, node)
    for number, node in enumerate(nodes):
        node.stamp[0] = 1000 if number % 2 else 10 * number
    for gone in (4, 3, 7, 5):
        withdraw(nodes[gone], 0)
        assert nodes[gone].entry[0] is None
    assert order.entries() == [(10 * number, nodes[number]) for number in (0, 1, 2, 6, 8)]


def on_host(world: World) -> set[tuple[bytes, int, int]]:
    """Every cell on the host: the last hash of its node, where the node begins and ends, and the component."""
    return {(node.hashes[-16:], node.end, c) for node in all_nodes(world) for c in range(world.count)
            if node.state[world.count + c] == PRESENT}  # fmt: skip


def all_nodes(world: World) -> Iterator[Node]:
    waiting: list[Node] = [*world.roots.values()]
    while waiting:
        node = waiting.pop()
        waiting.extend((node.children or {}).values())
        if node.parent is not None:
            yield node


def one_by_one(room: RoomMaker, needs: Sequence[int], cost: Cost) -> bool:
    """Evict the coldest cell, and the next, until there is room; False if one may not go gently."""
    world = room._world
    for place, need in enumerate(needs, world.count):
        while world.shelves[place].slots.left < need:
            node = room.coldest(place, EARLY) or room.coldest(place, LATE)
            if node is None:
                return False
            world.offer(node, place)
            if not room._may_go_gently(node, cost):
                return False
            room.evict(node, place)
    return True


@pytest.mark.slow(3)
@pytest.mark.source
@pytest.mark.parametrize("eviction", ["lru", "p2c"])
def test_what_goes_for_a_copy_that_can_wait_is_what_would_be_evicted_one_by_one(
    eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever room is made gently, the same is done one by one on a copy of the core. A refusal changes nothing."""
    seen = Counter[bool]()
    make = RoomMaker.make_gently

    def compared(room: RoomMaker, needs: Sequence[int], cost: Cost) -> Room:
        other = copy.deepcopy(room)
        other._world.limit = 1 << 60
        before = on_host(room._world)
        answer = make(room, needs, cost)
        made = answer is Room.FREE
        assert one_by_one(other, needs, cost) is made
        assert on_host(room._world) == (on_host(other._world) if made else before)
        seen[made] += 1
        return answer

    monkeypatch.setattr(RoomMaker, "make_gently", compared)
    for seed in range(4):
        draw = random.Random(seed)
        config = core_config("full,swa,mamba", device=24, host=12, states=8, eviction=eviction)
        run = SynchronousRuntime(resized(config, SWA, host=5), seed)
        texts = ["a"]
        for _ in range(40):
            text = draw.choice([*texts, ""]) + "".join(draw.choices("abcd", k=draw.randint(1, 4)))
            texts = [*texts, text[:10]][-15:]
            run.insert(texts[-1], checkpoint=draw.choice([0, len(texts[-1])]))
            for op in run.in_flight(BackupHost)[: draw.randint(0, 3)]:
                run.complete(op)
            for op in run.in_flight(BackupStorage)[: draw.randint(0, 4)]:
                run.complete(op, status=draw.choice([Status.DONE, Status.DONE, Status.FAILED]))
        run.settle()
    assert min(seen[True], seen[False]) > 10, seen


@pytest.mark.source
def test_a_refusal_holds_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many backups that can wait ask in a row: what the first chose in vain is not chosen again for each."""
    run = SynchronousRuntime(core_config(device=64, host=16))
    insert(run, "abcd", "efgh", "ijkl", "mnop")
    run.settle()
    room = run.core._transfers.room
    refused = next(all_nodes(run.core.world))
    chosen = Counter[str]()
    choose = RoomMaker._choose_gently

    def counted(room: RoomMaker, *more: Any) -> Room:
        chosen["times"] += 1
        return choose(room, *more)

    monkeypatch.setattr(RoomMaker, "_choose_gently", counted)
    monkeypatch.setattr(RoomMaker, "_may_go_gently", lambda room, node, cost: node is not refused)
    needs = [run.core.world.shelves[1].reachable()]
    for _ in range(5):
        assert room.make_gently(needs, Cost.SPARE) is Room.SHORT
    assert chosen["times"] == 1
    assert room.make_gently([needs[0] - 1], Cost.SPARE) is Room.SHORT or chosen["times"] == 2
    monkeypatch.setattr(RoomMaker, "_may_go_gently", lambda room, node, cost: True)
    assert room.make_gently(needs, Cost.SPARE) is Room.FREE


# Which windows and states stay when their pools are short: those of the ends that the next match is likely to have.


OTHER = "qrstuvwx"


def narrow(swa: int, states: int = 16, components: str = "full,swa", window: int = 2) -> SynchronousRuntime:
    """No host; ``swa`` pages and ``states`` states for it on the device; ``window`` in pages."""
    config = core_config(components, device=64, host=0, window=4 * window, states=states)
    return SynchronousRuntime(resized(config, SWA, device=swa))


def test_of_windows_that_are_short_those_of_ends_stay() -> None:
    """Of two prompts of eight pages, ends need two each; the other twelve are given up."""
    run = narrow(swa=16)
    insert(run, "abcdefgh", OTHER)
    take_beside_full(run, swa=12)
    assert reach(run, "abcdefgh", OTHER) == [8, 8]


def test_an_end_that_somebody_went_on_from_goes_before_an_older_one() -> None:
    run = narrow(swa=24)
    run.insert(OTHER)
    insert(run, "abcdefgh", "abcdefghijklmnop")
    take_beside_full(run, swa=20)
    assert reach(run, OTHER, "abcdefghijklmnop") == [8, 16]


def test_a_fork_is_an_end_and_is_used_with_the_second_text() -> None:
    """What texts have in common ends where they fork. It is used with the second, so after the end of the first."""
    texts = "abcdefghijkl", "abcdefgh" + OTHER[:4]
    for swa, left in ((18, [8, 12, 12]), (19, [8, 8, 12])):
        run = narrow(swa=24)
        insert(run, *texts)
        take_beside_full(run, swa=swa)
        assert reach(run, "abcdefghX", *texts) == left


def test_of_a_window_in_several_nodes_the_last_one_is_the_last_to_go() -> None:
    run = narrow(swa=8, window=4)
    insert(run, "abcdef", "abcdefgh")
    take_beside_full(run, swa=2)
    take_beside_full(run, swa=1)
    path, _ = run.core.world.find(SPACE, spell("abcdefgh"))
    assert [node.state[1] for node in path] == [ABSENT, ABSENT, PRESENT]


def test_a_state_that_somebody_went_on_from_goes_before_an_older_one_at_an_end() -> None:
    run = narrow(swa=64, states=6, components="full,mamba")
    run.insert(OTHER, checkpoint=8, states=2)
    run.insert("abcd", checkpoint=4, states=2)
    run.insert("abcdefgh", checkpoint=8, states=2)
    take_beside_full(run, states=4)
    assert reach(run, OTHER, "abcdefgh", "abcdX") == [8, 8, 0]
