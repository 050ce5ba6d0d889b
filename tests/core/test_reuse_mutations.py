"""Each law of ``p2c`` and of its queues is left out once, and the tests of the laws notice. So these tests can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from asynccache.core import eviction, policies, room
from asynccache.core.eviction import Order, Queue
from asynccache.core.match import Matches
from asynccache.core.policies import Curves, P2c
from asynccache.core.tree import Node
from tests.core import test_core_reuse as laws

pytestmark = [pytest.mark.slow, pytest.mark.source]

led = laws.test_every_step_passes_the_audit_while_it_leads_with_pins_transfers_and_namespaces
Patch = pytest.MonkeyPatch
Law = Callable[[Patch], None]


def checks() -> list[Callable[[Patch], None]]:
    """The tests of the laws, the quick ones first. A test patches on its own account in what it is given."""
    return [
        lambda patch: laws.test_worth_rises_and_then_falls_and_is_less_where_less_is_used_again(),
        lambda patch: laws.test_a_use_counts_at_its_age_and_what_forks_is_a_class_of_its_own(),
        lambda patch: laws.test_what_comes_back_is_known_again_and_goes_on_from_where_it_was(),
        laws.test_a_choice_that_is_not_worked_out_again_is_the_one_that_would_be,
        lambda patch: laws.test_a_cell_waits_in_the_queue_of_its_class_as_soon_as_it_was_used(),
        laws.test_ghosts_are_bounded_and_counted,
        lambda patch: laws.test_the_first_hundred_requests_are_those_of_lru(),
        lambda patch: led("full", 0),
        lambda patch: laws.test_it_keeps_what_comes_back_where_lru_keeps_what_was_last(),
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


@pytest.mark.parametrize("broken", LAWS, ids=lambda law: law.__name__)
def test_a_law_that_is_left_out_is_noticed(broken: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    for check in checks():
        try:
            with monkeypatch.context() as patch:
                check(patch)
        except Exception:  # a count, a law of the audit
            return
    pytest.fail("nothing noticed it")
