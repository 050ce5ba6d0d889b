"""Each rule is left out once, and the tests of the rules notice. So these tests can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from asynccache.core import eviction, policies, room
from asynccache.core.eviction import Order, Queue, Recency
from asynccache.core.leases import Leases
from asynccache.core.ledger import NOWHERE
from asynccache.core.match import Matches
from asynccache.core.policies import Curves, P2c
from asynccache.core.room import Cost, Room, RoomMaker
from asynccache.core.transfers import Transfers
from asynccache.core.tree import ABSENT, PRESENT, Node
from asynccache.core.world import EARLY, LATE, World
from tests.core import test_core_ends as ends
from tests.core import test_core_eviction as laws
from tests.core import test_core_reuse as reuse
from tests.core.test_core_machine import play
from tests.simulated.leading import leading

pytestmark = [pytest.mark.source, pytest.mark.slow, pytest.mark.usefixtures("breaks_a_core")]

Patch = pytest.MonkeyPatch
Check = Callable[[Patch], object]
Rules = dict[str, tuple[Any, str, Any]]
"""What is left out: where, what is put instead of it, and that."""

POLICIES = ("write_through", "write_through_selective", "write_back")


def unpatched(*tests: Callable[[], object]) -> list[Check]:
    return [lambda patch, test=test: test() for test in tests]  # type: ignore[misc]


# eviction


CHECKS = unpatched(
    laws.test_the_coldest_leaf_goes_first_saved_or_not,
    laws.test_copies_of_what_stays_on_the_device_leave_the_host_first,
    laws.test_a_copy_of_what_stays_on_the_device_goes_before_what_the_device_lacks,
    laws.test_what_is_saved_ahead_keeps_its_copy_until_it_has_left,
    *(lambda p=p: laws.test_what_is_saved_ahead_leaves_before_what_is_younger_and_stays_if_it_is_wanted(p)
      for p in POLICIES),
    *(lambda p=p: laws.test_no_host_is_so_small_that_it_costs_hits(p, False) for p in POLICIES),
    laws.test_a_copy_that_was_made_for_somebody_who_waits_is_not_given_up_for_one_that_can_wait,
    *(lambda p=p: ends.test_the_host_gives_up_what_was_saved_ahead_of_demand_for_what_only_the_device_has(p, "full")
      for p in POLICIES),
    laws.test_a_copy_that_can_wait_has_nothing_evicted_in_vain,
    *(lambda s=s: laws.test_who_waits_alone_for_backups_gets_the_room_that_they_make(s) for s in (3, 5, 39)),
)  # fmt: skip

_order, _condemn, _saving, _gently = World.eviction_order, World.condemn, RoomMaker._saving, RoomMaker._may_go_gently


def _saved_first(world: World, node: Node, place: int) -> int:
    if place < world.count:
        return LATE if world.has_host and node.state[place + world.count] != PRESENT else EARLY
    return _order(world, node, place)


def _newest_stay(world: World, node: Node, place: int) -> int:
    if place >= world.count:
        return LATE if node.state[place - world.count] != ABSENT else EARLY
    return _order(world, node, place)


def _duplicate(world: World, node: Node, place: int) -> int:
    if place >= world.count:
        return EARLY if node.state[place - world.count] != ABSENT else LATE
    return _order(world, node, place)


def _unmarked(room: RoomMaker, place: int, need: int) -> Room:
    with Patch.context() as patch:
        patch.setattr(World, "condemn", lambda world, node, c: None)
        return _saving(room, place, need)


def _step_by_step(room: RoomMaker, needs: Sequence[int], cost: Cost) -> Room:
    return Room.FREE if laws.one_by_one(room, needs, cost) else Room.SHORT


EVICTION: Rules = {
    "the device evicts saved leaves first": (World, "eviction_order", _saved_first),
    "the host keeps copies of what stays on the device": (World, "eviction_order", _newest_stay),
    "a copy of what is about to leave counts as a duplicate": (World, "eviction_order", _duplicate),
    "what is saved for somebody who waits is not marked": (RoomMaker, "_saving", _unmarked),
    "a copy that can wait takes one that was made for somebody who waits": (
        RoomMaker, "_may_go_gently", lambda room, node, cost: _gently(room, node, Cost.STORED)),
    "a drain spares a copy that was made for somebody who waits": (
        RoomMaker, "_may_go_gently", lambda room, node, cost: _gently(room, node, Cost.SPARE)),
    "what can wait goes as far as it may, whether that is enough or not": (RoomMaker, "make_gently", _step_by_step),
    "what is wanted again leaves all the same": (World, "reprieve", lambda world, node: None),
    "nothing is saved ahead": (Transfers, "backup_coldest", lambda transfers: None),
    "a full host takes copies of what is committed": (
        Transfers, "backup_or_defer", lambda self, node, floor=1 << 60: self.backup_host(node, floor)),
    "nobody waits for an only copy to be saved": (RoomMaker, "is_expendable", lambda room, node, place: True),
}  # fmt: skip


# which windows and states stay, and what goes when a conversation is over


LIKELY_ENDS = unpatched(
    laws.test_of_windows_that_are_short_those_of_ends_stay,
    laws.test_an_end_that_somebody_went_on_from_goes_before_an_older_one,
    laws.test_a_fork_is_an_end_and_is_used_with_the_second_text,
    laws.test_of_a_window_in_several_nodes_the_last_one_is_the_last_to_go,
    laws.test_a_state_that_somebody_went_on_from_goes_before_an_older_one_at_an_end,
)
CONVERSATIONS = unpatched(*(lambda case=case: ends.test_of_a_conversation_that_is_over_what_is_private_goes_first(case)
                            for case in ends.CONVERSATIONS))  # fmt: skip

_set_idle, _touch_end = World.set_idle, Matches._touch_end


def _everywhere(matches: Matches, node: Node, begin: int) -> None:
    above: Node | None = _touch_end(matches, node, node.end)
    while above is not None and above.parent is not None:
        for c in range(1, len(node.stamp)):
            _set_idle(matches._world, above, c)
        above = above.parent


def _end_first(matches: Matches, node: Node, end: int) -> Node:
    above = _touch_end(matches, node, end)
    while node is not above:
        matches._world.recency.touch(node, 1)
        node = node.parent  # type: ignore[assignment]
    return above


ENDS: Rules = {
    "new cells count as used": (Recency, "idle", Recency.touch),
    "ends are not told when a request is over": (Matches, "leave", lambda matches, node, begin: None),
    "what is gone on from stays an end": (World, "set_idle", lambda world, node, c: True),
    "forks are no ends": (Matches, "leave", _everywhere),
    "the end is stamped first": (Matches, "_touch_end", _end_first),
}
PRIVACY: Rules = {
    "what is said is not heard": (Leases, "_private", lambda leases, ask: NOWHERE),
    "everything is private": (Leases, "_private", lambda leases, ask: 0),
}


# ``p2c`` and its queues


def led(components: str, device: int, random_seed: int) -> None:
    """Any order of calls while ``p2c`` leads."""
    with leading():
        play(120, 40, components=components, random_seed=random_seed,
             options={"host": 0, "device": device, "eviction": "p2c"})


REUSE: list[Check] = [
    *unpatched(reuse.test_worth_rises_and_then_falls_and_is_less_where_less_is_used_again,
               reuse.test_a_use_counts_at_its_age_and_what_forks_is_a_class_of_its_own,
               reuse.test_what_comes_back_is_known_again_and_goes_on_from_where_it_was),
    reuse.test_a_choice_that_is_not_worked_out_again_is_the_one_that_would_be,
    *unpatched(reuse.test_a_cell_waits_in_the_queue_of_its_class_as_soon_as_it_was_used),
    reuse.test_ghosts_are_bounded_and_counted,
    *unpatched(reuse.test_the_first_hundred_requests_are_those_of_lru,
               reuse.test_the_duel_gives_up_a_conversation_that_has_ended,
               lambda: led("full,swa,mamba", 32, 4), lambda: led("full", 12, 1),
               reuse.test_it_keeps_what_comes_back_where_lru_keeps_what_was_last),
]  # fmt: skip
"""The quick ones first."""

_choose, _compare, _look, _forget, _take = P2c.choose, P2c._compare, P2c._look, P2c.forget, eviction.take


def _first_oldest(policy: P2c, order: Order, now: int) -> Node | None:
    queue = next((queue for queue in order.rest if queue.chunks), None)
    return queue.oldest() if queue is not None else None


def _newest(policy: P2c, order: Order, now: int) -> Node | None:
    if policy._lessons:
        return _choose(policy, order, now)
    queue = next((queue for queue in order.rest if queue.chunks), None)
    return queue.newest() if queue is not None else None


def _kept(policy: P2c, order: Order, now: int) -> Node | None:
    lead = order.note
    if lead is not None and lead.ends is not None and lead.queue.chunks:
        found: Node = lead.queue.newest() if lead.ends.newest else lead.queue.oldest()
        return found
    return _compare(policy, order, now)


def _once(policy: P2c, queue: Queue, worth: Sequence[float], now: int) -> policies._Ends:
    kept: policies._Ends | None = queue.note
    return _look(policy, queue, worth, now) if kept is None else kept


def _use(matches: Matches, end: Node, forked: int) -> None:
    world = matches._world
    if world.policy.learns:
        world.policy.use(end, forked, world.recency.tick())


def _left(node: Node, place: int) -> int:
    entry = node.entry[place]
    stamp = _take(node, place)
    if entry is not None and node.pins[place]:
        node.entry[place] = entry
    return stamp


def _pinned(policy: P2c, order: Order, now: int) -> Node | None:
    waiting = (part.nodes for queue in order.rest for part in queue.chunks)
    used = (node for nodes in waiting for node in nodes[1:-1] if node.pins[0])
    return next(used, None) or _compare(policy, order, now)


def _alive(policy: P2c, node: Node, parent: Node, page: bytes, now: int) -> None:
    if not node.root.dead:
        _forget(policy, node, parent, page, now)


def _uneven(values: Sequence[float]) -> list[float]:
    return [value * (1 + k % 2) for k, value in enumerate(values)]


LAWS: Rules = {
    "nothing is learned": (Curves, "learn", lambda curves, now: None),
    "a use counts at no age": (policies, "bin_of", lambda age: 0),
    "all are of one class": (policies, "_CLASS", (0,) * 64),
    "forks are not counted": (policies, "_USED_AND_FORKED", policies._USED),
    "worth need not fall": (policies, "_unimodal", _uneven),
    "who left is not remembered": (P2c, "forget", lambda policy, node, parent, page, now: None),
    "who left is remembered for ever": (P2c, "_forget_ghosts", lambda policy, now: None),
    "a new node is not cut where it was": (P2c, "recall", lambda policy, parent, page: 0),
    "who comes back begins anew": (P2c, "_return", lambda policy, node, parent, now: None),
    "the newest goes while nothing is known": (P2c, "choose", _newest),
    "the first queue goes before all others": (P2c, "choose", _first_oldest),
    "a choice is kept whatever changes": (P2c, "choose", _kept),
    "the ends of a queue are looked at once": (P2c, "_look", _once),
    "a cell stays in the queue of its class before": (Matches, "use", _use),
    "what was chosen waits on": (room, "take", _left),
    "what is in use is proposed wherever it waits": (P2c, "_compare", _pinned),
    "the duel is not told of what was ended": (P2c, "end", lambda policy, node: None),
    "blocks of a namespace that is forgotten wait on": (P2c, "forget", _alive),
}


GROUPS = ((EVICTION, CHECKS), (ENDS, LIKELY_ENDS), (PRIVACY, CONVERSATIONS), (LAWS, REUSE))


@pytest.mark.parametrize(("rule", "checks"), [
    pytest.param(rule, checks, id=name) for rules, checks in GROUPS for name, rule in rules.items()
])  # fmt: skip
def test_a_rule_that_is_left_out_is_noticed(
    rule: tuple[Any, str, Any], checks: Sequence[Check], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(*rule)
    for check in checks:
        try:
            with monkeypatch.context() as patch:
                check(patch)
        except Exception:  # wrong bytes, a law of the audit, a count
            return
    pytest.fail("nothing noticed it")
