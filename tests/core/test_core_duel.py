"""The duel of ``p2c`` with ``lru``: who leads, what both small caches hold, and that the books of both are right."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from asynccache.core import duel
from asynccache.core.duel import HEAT, Duel
from asynccache.core.eviction import Lru, Order
from asynccache.core.reuse import _EDGES, BINS, CLASSES, P2c
from asynccache.core.tree import Node, Root, cut, link
from tests.core.test_core_reuse import conversations, fresh, hits, insert_and_end, lately, loop, once, runtime, then
from tests.simulated.synchronous import FULL, SPACE, SynchronousRuntime, core_config, spell

Text = Sequence[int]


class Tree:
    """Paths of nodes as a cache would hand them over; nothing leaves it. Each letter is a page."""

    def __init__(self, duel: Duel) -> None:
        self.duel = duel
        self.root = Root(SPACE, 1)
        self.now = 0

    def node(self, parent: Node, text: str) -> Node:
        """The node that begins with ``text`` below ``parent``: made, or divided so that it ends with it."""
        found = (parent.children or {}).get(spell(text[0]))
        if found is None:
            found = Node(spell(text), parent.end + len(text), parent, 1)
            found.heat = self.duel.draw() << HEAT
            link(parent, found, 16)
        elif len(found.key) > 16 * len(text):
            found = cut(found, len(text), 16)
        return found

    def use(self, *texts: str, kind: int = 0) -> bool:
        """A request over nodes with these texts, in a row."""
        path, parent = [], self.root
        for text in texts:
            node = self.node(parent, text)
            path.append((node, kind))
            parent = node  # type: ignore[assignment]
        self.now += 1_000_000
        changed = self.duel.use([(node, kind) for node, kind in path if node.heat >> HEAT], self.now)
        check(self.duel)
        return changed


def new(pages: int, worth: list[list[float]] | None = None) -> Tree:
    return Tree(Duel(pages, worth or [[1.0] * BINS for _ in CLASSES], _EDGES))


def check(duel: Duel) -> None:
    """Every sum of a duel is what it should be, and nothing is forgotten or kept for nothing."""
    seen = duel._seen.values()
    assert duel._held_lately == sum(one.pages for one in seen if one.lately)
    assert duel._held_worthy == sum(one.pages for one in seen if one.worthy)
    assert all(one.lately or one.worthy for one in seen)
    assert {one.number for one in seen if one.lately} == set(duel._lately)
    waiting = [one.number for queue in duel._queues for _, _, one in queue]
    assert sorted(waiting) == sorted(one.number for one in seen if one.worthy and not one.kids)
    for kind, queue in enumerate(duel._queues):
        assert [(used, number) for used, number, _ in queue] == sorted((one.used, one.number) for _, _, one in queue)
        assert all(one.kind == kind for _, _, one in queue)
    for one in seen:
        assert one.kids == sum(other.parent is one for other in seen if other.worthy)
        if one.worthy and one.parent is not None:
            assert one.parent.worthy, "what hangs below a node goes before it"


def held(tree: Tree) -> tuple[int, int]:
    return tree.duel._held_lately, tree.duel._held_worthy


def test_both_hold_as_much_as_there_is_room_for_and_what_is_used_stays() -> None:
    tree = new(8)
    for text in ("abc", "def", "ghi", "jkl"):
        tree.use(text)
        assert max(held(tree)) <= 8
    assert held(tree) == (6, 6)


def test_a_path_that_is_longer_than_the_room_is_held_while_it_is_used() -> None:
    tree = new(4)
    tree.use("abc", "def", "ghi")
    assert held(tree) == (9, 9)
    tree.use("jk")
    assert held(tree) == (2, 2)


def test_as_long_as_all_is_worth_the_same_both_find_the_same() -> None:
    tree, draw = new(12), random.Random(3)
    for _ in range(300):
        tree.use(draw.choice("abcdefgh") * 3)
        assert tree.duel.ahead == 0
        assert not tree.duel.leads


def prefer_the_old() -> list[list[float]]:
    """What was used just now is worth least."""
    return [[float(k) for k in range(BINS)] for _ in CLASSES]


def test_who_finds_more_leads_and_who_finds_less_does_not() -> None:
    tree = new(12, prefer_the_old())
    changes = [tree.use(text * 3) for _ in range(8) for text in "abcdef"]
    assert tree.duel.leads, "of a loop that does not fit, the oldest is what comes back next"
    assert sum(changes) == 1
    for _ in range(8):
        for text in "mnop":
            tree.use(text * 3)
            tree.use(text * 3)
    for text in "ghijklmnopqrstuvwxyz" * 2:
        tree.use(text * 3)
    while tree.duel.leads:
        text = chr(0x4E00 + tree.now // 1_000_000)
        for _ in range(2):
            tree.use(text * 3)
            tree.use("z" * 3)
    assert tree.duel.ahead <= 0


def test_what_was_long_ago_counts_for_no_more_than_the_bound() -> None:
    tree = new(12, prefer_the_old())
    for _ in range(200):
        for text in "abcdef":
            tree.use(text * 3)
    assert tree.duel.ahead == max(1, 12 // duel._BOUND)


def test_of_a_node_that_was_divided_the_first_part_is_known() -> None:
    tree = new(12)
    tree.use("abcd")
    tree.use("ab", "xy")
    assert held(tree) == (4, 4), "of what it was only the first part; the rest was not used"
    tree.use("ab", "cd")
    assert held(tree) == (6, 6)
    numbers = [one.number for one in tree.duel._seen.values()]
    assert len(set(numbers)) == 3


def test_what_was_ended_leaves_both() -> None:
    tree = new(12)
    tree.use("ab", "cd")
    tree.use("ab", "ef")
    for first, second in (("ab", "cd"), ("ab", "ef")):
        tree.duel.end(tree.node(tree.node(tree.root, first), second))
        check(tree.duel)
    assert held(tree) == (2, 2)
    tree.duel.end(tree.node(tree.root, "ab"))
    assert len(tree.duel._seen) == 0


def test_of_large_caches_only_some_nodes_are_drawn() -> None:
    big = Duel(64 * duel._MOST_PAGES, prefer_the_old(), _EDGES)
    drawn = sum(big.draw() > 0 for _ in range(64_000))
    assert 850 <= drawn <= 1150
    assert big._room == duel._MOST_PAGES
    assert all(Duel(1000, prefer_the_old(), _EDGES).draw() for _ in range(100))


@pytest.mark.parametrize("seed", range(6))
def test_its_books_are_right_after_every_request(seed: int) -> None:
    run = runtime("p2c", device=40)
    policy, draw = run.core.world.policy, random.Random(seed)
    assert isinstance(policy, P2c)
    for number in range(300):
        run.core.at(number)
        text = "".join(draw.choice("abc") for _ in range(draw.randrange(1, 12)))
        if draw.random() < 0.2:
            insert_and_end(run, text)
        else:
            run.insert(text)
        check(policy.duel)
        assert len(policy.duel._seen) <= 2 * 40


@pytest.mark.source
def test_as_long_as_it_does_not_lead_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(duel: Duel, path: object, now: int) -> bool:
        return False

    monkeypatch.setattr(Duel, "use", stays)
    for requests in (conversations(600), lately(600), loop(600), then(lately(300), once(300))):
        for device in (16, 40, 120):
            assert hits("p2c", requests, device) == hits("lru", requests, device)


def test_a_change_of_the_lead_is_noticed_by_the_next_choice() -> None:
    policy, second = P2c(core_config(device=40, page_size=512)), 1_000_000
    now, worth = 10_000 * second, policy.curves.worth
    order, root = Order(0, policy.queues), Root(SPACE, 1)
    nodes = [Node(spell(fresh(i, 1)), 1, root, 1) for i in range(2)]
    for node, age in zip(nodes, (1_000, 10), strict=True):
        order.rest[0].put(now - age * second, node)
    worth[0] = [float(k) for k in range(BINS)]
    assert policy.choose(order, now) is nodes[0]
    policy.duel.leads = True
    policy._version += 1
    assert policy.choose(order, now) is nodes[1]


@pytest.mark.parametrize("eviction", ["lru", "p2c"])
def test_with_a_host_below_it_the_device_gives_up_what_was_used_least_recently(eviction: str) -> None:
    world = runtime(eviction, "full,swa", device=16, host=8).core.world
    assert [type(shelf.policy) for shelf in world.shelves[: world.count]] == [Lru, Lru]
    assert {shelf.policy for shelf in world.shelves[world.count :]} == {world.policy}


TEXTS = ("abcd", "efgh", "ijkl", "ABCD", "EFGH", "IJKL")


def filled(*, storage: bool) -> SynchronousRuntime:
    """Device and host are full, of different pages; the last request's conversation has ended."""
    run = runtime("lru", device=12, host=8, storage=storage)
    for text in (*TEXTS, "mnop"):
        for _ in range(4):
            run.settle()
            request = run.lease(spell(text, run.page))
            if request is not None:
                break
        assert request is not None
        request.compute(4 * run.page)
        assert request.commit()
        request.release(ended=text == "mnop")
    run.settle()
    return run


def on_host(run: SynchronousRuntime) -> list[str]:
    return [text for text in (*TEXTS, "mnop") if run.reach(text) == (0, 4)]


def test_what_would_go_from_the_host_before_all_that_is_there_is_not_copied_to_it() -> None:
    """A conversation that has ended leaves the device without a copy, and nothing is lost that somebody wants."""
    run = filled(storage=False)
    run.insert("qrst")
    run.settle()
    assert run.reach("mnop") == (0, 0)
    assert on_host(run) == ["ijkl", "ABCD"], "which were there before"
    assert run.core.statistics().lost_pages == 0


def test_what_storage_lacks_is_copied_to_the_host_all_the_same() -> None:
    run = filled(storage=True)
    run.insert("qrst")
    run.settle()
    run.flush()
    stored = {digest for component, digest in run.storage if component == FULL}
    assert stored >= set(run.chain(SPACE, spell("mnop", 512)))
