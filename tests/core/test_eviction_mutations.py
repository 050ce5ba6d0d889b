"""Each rule of eviction is left out once, and the tests of the rules notice. So these tests can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asynccache.core.room import Cost, Room, RoomMaker
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, PRESENT, Node
from asynccache.core.world import EARLY, LATE, World
from tests.core import test_core_eviction as laws
from tests.core.test_core_ends import (
    test_the_host_gives_up_what_was_saved_ahead_of_demand_for_what_only_the_device_has as saved_ahead_gives_way,
)

pytestmark = pytest.mark.slow

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
