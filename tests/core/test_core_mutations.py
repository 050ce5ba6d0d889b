"""Each rule is left out once, and the tests of the rules notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asynccache.core import eviction, policies, room
from asynccache.core.eviction import Order, Queue
from asynccache.core.match import Matches
from asynccache.core.policies import Curves, P2c
from asynccache.core.room import Cost, Room, RoomMaker
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, PRESENT, Node
from asynccache.core.world import EARLY, LATE, World
from tests.core import test_core_eviction as laws
from tests.core import test_core_reuse as reuse_laws
from tests.core.test_core_ends import (
    test_the_host_gives_up_what_was_saved_ahead_of_demand_for_what_only_the_device_has as saved_ahead_gives_way,
)
from tests.core.test_core_machine import play
from tests.simulated.leading import leading

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("breaks_a_core")]

# Each rule of eviction is left out once, and the tests of the rules notice. So these tests can fail.


Patch = pytest.MonkeyPatch
Rule = Callable[[Patch], None]

POLICIES = ("write_through", "write_through_selective", "write_back")


def checks() -> list[Callable[[], None]]:
    """The tests of the rules."""
    return [
        laws.test_the_coldest_leaf_goes_first_saved_or_not,
        laws.test_copies_of_what_stays_on_the_device_leave_the_host_first,
        laws.test_a_copy_of_what_stays_on_the_device_goes_before_what_the_device_lacks,
        laws.test_what_is_saved_ahead_keeps_its_copy_until_it_has_left,
        *(lambda p=p: laws.test_what_is_saved_ahead_leaves_before_what_is_younger_and_stays_if_it_is_wanted(p)
          for p in POLICIES),
        *(lambda p=p: laws.test_no_host_is_so_small_that_it_costs_hits(p, False) for p in POLICIES),
        laws.test_a_copy_that_was_made_for_somebody_who_waits_is_not_given_up_for_one_that_can_wait,
        *(lambda p=p: saved_ahead_gives_way(p, "full")
          for p in POLICIES),
        laws.test_a_copy_that_can_wait_has_nothing_evicted_in_vain,
        *(lambda s=s: laws.test_who_waits_alone_for_backups_gets_the_room_that_they_make(s) for s in (3, 5, 39)),
    ]  # fmt: skip


def the_device_evicts_saved_leaves_first(patch: Patch) -> None:
    usual = World.eviction_order

    def saved_first(world: World, node: Node, place: int) -> int:
        if place < world.count:
            return LATE if world.has_host and node.state[place + world.count] != PRESENT else EARLY
        return usual(world, node, place)

    patch.setattr(World, "eviction_order", saved_first)


def the_host_keeps_copies_of_what_stays_on_the_device(patch: Patch) -> None:
    usual = World.eviction_order

    def newest_stay(world: World, node: Node, place: int) -> int:
        if place >= world.count:
            return LATE if node.state[place - world.count] != ABSENT else EARLY
        return usual(world, node, place)

    patch.setattr(World, "eviction_order", newest_stay)


def a_copy_of_what_is_about_to_leave_counts_as_a_duplicate(patch: Patch) -> None:
    usual = World.eviction_order

    def duplicate(world: World, node: Node, place: int) -> int:
        if place >= world.count:
            return EARLY if node.state[place - world.count] != ABSENT else LATE
        return usual(world, node, place)

    patch.setattr(World, "eviction_order", duplicate)


def what_is_saved_for_somebody_who_waits_is_not_marked(patch: Patch) -> None:
    condemn, saving, inside = World.condemn, RoomMaker._saving, [False]

    def marked(world: World, node: Node, c: int) -> None:
        if not inside[0]:
            condemn(world, node, c)

    def watched(room: RoomMaker, place: int, need: int) -> Room:
        inside[0] = True
        try:
            return saving(room, place, need)
        finally:
            inside[0] = False

    patch.setattr(World, "condemn", marked)
    patch.setattr(RoomMaker, "_saving", watched)


def a_copy_that_can_wait_takes_one_that_was_made_for_somebody_who_waits(patch: Patch) -> None:
    can_wait = RoomMaker._may_go_gently

    patch.setattr(RoomMaker, "_may_go_gently", lambda room, node, cost: can_wait(room, node, Cost.STORED))


def a_drain_spares_a_copy_that_was_made_for_somebody_who_waits(patch: Patch) -> None:
    can_wait = RoomMaker._may_go_gently
    patch.setattr(RoomMaker, "_may_go_gently", lambda room, node, cost: can_wait(room, node, Cost.SPARE))


def what_can_wait_goes_as_far_as_it_may_whether_that_is_enough_or_not(patch: Patch) -> None:
    def step_by_step(room: RoomMaker, needs: Sequence[int], cost: Cost) -> Room:
        for place, need in enumerate(needs, room._world.count):
            while room._world.shelves[place].slots.left < need:
                node = room.coldest(place, EARLY) or room.coldest(place, LATE)
                if node is None:
                    return Room.SHORT
                room._world.offer(node, place)
                if not room._may_go_gently(node, cost):
                    return Room.SHORT
                room.evict(node, place)
        return Room.FREE

    patch.setattr(RoomMaker, "make_gently", step_by_step)


def what_is_wanted_again_leaves_all_the_same(patch: Patch) -> None:
    patch.setattr(World, "reprieve", lambda world, node: None)


def nothing_is_saved_ahead(patch: Patch) -> None:
    patch.setattr(Transfers, "backup_coldest", lambda transfers: None)


def a_full_host_takes_copies_of_what_is_committed(patch: Patch) -> None:
    patch.setattr(Transfers, "backup_or_defer", lambda self, node, floor=1 << 60: self.backup_host(node, floor))


def nobody_waits_for_an_only_copy_to_be_saved(patch: Patch) -> None:
    patch.setattr(RoomMaker, "is_expendable", lambda room, node, place: True)


RULES: tuple[Rule, ...] = (
    the_device_evicts_saved_leaves_first,
    the_host_keeps_copies_of_what_stays_on_the_device,
    a_copy_of_what_is_about_to_leave_counts_as_a_duplicate,
    what_is_saved_for_somebody_who_waits_is_not_marked,
    a_copy_that_can_wait_takes_one_that_was_made_for_somebody_who_waits,
    a_drain_spares_a_copy_that_was_made_for_somebody_who_waits,
    what_can_wait_goes_as_far_as_it_may_whether_that_is_enough_or_not,
    what_is_wanted_again_leaves_all_the_same,
    nothing_is_saved_ahead,
    a_full_host_takes_copies_of_what_is_committed,
    nobody_waits_for_an_only_copy_to_be_saved,
)


@pytest.mark.source
@pytest.mark.parametrize("broken", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_left_out_is_noticed(broken: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    for check in checks():
        try:
            check()
        except Exception:  # wrong bytes, a law of the audit, a count
            return
    pytest.fail("nothing noticed it")


# Each law of ``p2c`` and of its queues is left out once, and the tests of the laws notice. So these tests can fail.


Law = Callable[[Patch], None]


def led(components: str, device: int, random_seed: int) -> None:
    """Any order of calls while ``p2c`` leads."""
    with leading():
        play(120, 40, components=components, random_seed=random_seed,
             options={"host": 0, "device": device, "eviction": "p2c"})


def reuse_checks() -> list[Callable[[Patch], None]]:
    """The tests of the laws, the quick ones first. A test patches on its own account in what it is given."""
    return [
        lambda patch: reuse_laws.test_worth_rises_and_then_falls_and_is_less_where_less_is_used_again(),
        lambda patch: reuse_laws.test_a_use_counts_at_its_age_and_what_forks_is_a_class_of_its_own(),
        lambda patch: reuse_laws.test_what_comes_back_is_known_again_and_goes_on_from_where_it_was(),
        reuse_laws.test_a_choice_that_is_not_worked_out_again_is_the_one_that_would_be,
        lambda patch: reuse_laws.test_a_cell_waits_in_the_queue_of_its_class_as_soon_as_it_was_used(),
        reuse_laws.test_ghosts_are_bounded_and_counted,
        lambda patch: reuse_laws.test_the_first_hundred_requests_are_those_of_lru(),
        lambda patch: reuse_laws.test_the_duel_gives_up_a_conversation_that_has_ended(),
        lambda patch: led("full,swa,mamba", 32, 4),
        lambda patch: led("full", 12, 1),
        lambda patch: reuse_laws.test_it_keeps_what_comes_back_where_lru_keeps_what_was_last(),
    ]


def nothing_is_learned(patch: Patch) -> None:
    patch.setattr(Curves, "learn", lambda curves, now: None)


def a_use_counts_at_no_age(patch: Patch) -> None:
    patch.setattr(policies, "bin_of", lambda age: 0)


def all_are_of_one_class(patch: Patch) -> None:
    patch.setattr(policies, "_CLASS", (0,) * 64)


def forks_are_not_counted(patch: Patch) -> None:
    patch.setattr(policies, "_USED_AND_FORKED", policies._USED)


def worth_need_not_fall(patch: Patch) -> None:
    patch.setattr(policies, "_unimodal", lambda values: list(values))
    patch.setattr(policies, "_smooth", lambda values: [value * (1 + k % 2) for k, value in enumerate(values)])


def who_left_is_not_remembered(patch: Patch) -> None:
    patch.setattr(P2c, "forget", lambda policy, node, parent, page, now: None)


def who_left_is_remembered_for_ever(patch: Patch) -> None:
    patch.setattr(P2c, "_forget_ghosts", lambda policy, now: None)


def a_new_node_is_not_cut_where_it_was(patch: Patch) -> None:
    patch.setattr(P2c, "recall", lambda policy, parent, page: 0)


def who_comes_back_begins_anew(patch: Patch) -> None:
    patch.setattr(P2c, "_return", lambda policy, node, parent, now: None)


def the_newest_goes_while_nothing_is_known(patch: Patch) -> None:
    choose = P2c.choose

    def newest(policy: P2c, order: Order, now: int) -> Node | None:
        if policy._lessons:
            return choose(policy, order, now)
        queue = next((queue for queue in order.rest if queue.slices), None)
        return queue.newest() if queue is not None else None

    patch.setattr(P2c, "choose", newest)


def the_first_queue_goes_before_all_others(patch: Patch) -> None:
    def first(policy: P2c, order: Order, now: int) -> Node | None:
        queue = next((queue for queue in order.rest if queue.slices), None)
        return queue.oldest() if queue is not None else None

    patch.setattr(P2c, "choose", first)


def a_choice_is_kept_whatever_changes(patch: Patch) -> None:
    compare = P2c._compare

    def kept(policy: P2c, order: Order, now: int) -> Node | None:
        lead = order.note
        if lead is not None and lead.ends is not None and lead.queue.slices:
            found: Node = lead.queue.newest() if lead.ends.newest else lead.queue.oldest()
            return found
        return compare(policy, order, now)

    patch.setattr(P2c, "choose", kept)


def the_ends_of_a_queue_are_looked_at_once(patch: Patch) -> None:
    look = P2c._look

    def once(policy: P2c, queue: Queue, worth: Sequence[float], now: int) -> policies._Ends:
        kept: policies._Ends | None = queue.note
        return look(policy, queue, worth, now) if kept is None else kept

    patch.setattr(P2c, "_look", once)


def a_cell_stays_in_the_queue_of_its_class_before(patch: Patch) -> None:
    def use(matches: Matches, end: Node, forked: int) -> None:
        world = matches._world
        if world.policy.learns:
            world.policy.use(end, forked, world.recency.tick())

    patch.setattr(Matches, "use", use)


def what_was_chosen_waits_on(patch: Patch) -> None:
    take = eviction.take

    def left(node: Node, place: int) -> int:
        entry = node.entry[place]
        stamp = take(node, place)
        if entry is not None and node.pins[place]:
            node.entry[place] = entry
        return stamp

    patch.setattr(room, "take", left)


def what_is_in_use_is_proposed_wherever_it_waits(patch: Patch) -> None:
    compare = P2c._compare

    def pinned(policy: P2c, order: Order, now: int) -> Node | None:
        waiting = (part.nodes for queue in order.rest for part in queue.slices)
        used = (node for nodes in waiting for node in nodes[1:-1] if node.pins[0])
        return next(used, None) or compare(policy, order, now)

    patch.setattr(P2c, "_compare", pinned)


def the_duel_is_not_told_of_what_was_ended(patch: Patch) -> None:
    patch.setattr(P2c, "end", lambda policy, node: None)


def blocks_of_a_namespace_that_is_forgotten_wait_on(patch: Patch) -> None:
    forget = P2c.forget

    def alive(policy: P2c, node: Node, parent: Node, page: bytes, now: int) -> None:
        if not node.root.dead:
            forget(policy, node, parent, page, now)

    patch.setattr(P2c, "forget", alive)


LAWS: tuple[Law, ...] = (
    nothing_is_learned,
    a_use_counts_at_no_age,
    all_are_of_one_class,
    forks_are_not_counted,
    worth_need_not_fall,
    who_left_is_not_remembered,
    who_left_is_remembered_for_ever,
    a_new_node_is_not_cut_where_it_was,
    who_comes_back_begins_anew,
    the_newest_goes_while_nothing_is_known,
    the_first_queue_goes_before_all_others,
    a_choice_is_kept_whatever_changes,
    the_ends_of_a_queue_are_looked_at_once,
    a_cell_stays_in_the_queue_of_its_class_before,
    what_was_chosen_waits_on,
    what_is_in_use_is_proposed_wherever_it_waits,
    the_duel_is_not_told_of_what_was_ended,
    blocks_of_a_namespace_that_is_forgotten_wait_on,
)


@pytest.mark.source
@pytest.mark.parametrize("broken", LAWS, ids=lambda law: law.__name__)
def test_a_law_that_is_left_out_is_noticed(broken: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    for check in reuse_checks():
        try:
            with monkeypatch.context() as patch:
                check(patch)
        except Exception:  # a count, a law of the audit
            return
    pytest.fail("nothing noticed it")
