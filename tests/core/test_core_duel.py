"""The duel of ``p2c`` with ``lru``: who leads, what both small caches hold, and that the books of both are right."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from asynccache.core import policies
from asynccache.core.eviction import EvictionPolicy, Lru, Order
from asynccache.core.policies import _EDGES, BINS, CLASSES, HEAT_BITS, POLICIES, Duel, P2c, _Usual
from asynccache.core.room import Verdict
from asynccache.core.settings import Access
from asynccache.core.tree import PRESENT, Node, Root, cut, link, walk
from asynccache.core.world import LATE
from tests.core.test_core_reuse import conversations, fresh, hits, insert_and_end, lately, loop, once, runtime, then
from tests.simulated.leading import check_books, check_duel
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
            found.heat = self.duel.draw() << HEAT_BITS
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
        changed = self.duel.use([(node, kind) for node, kind in path if node.heat >> HEAT_BITS], self.now)
        check_duel(self.duel)
        return changed


def new(pages: int, worth: list[list[float]] | None = None) -> Tree:
    return Tree(Duel(pages, worth or [[1.0] * BINS for _ in CLASSES], _EDGES))


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


def test_a_long_prompt_after_many_small_nodes_makes_room_in_several_calls() -> None:
    tree = new(200)
    for i in range(200):
        tree.use(chr(1000 + i))
    tree.use("a" * 150)
    assert held(tree) == (286, 286), "64 nodes at a time"
    for i in range(10):
        before = len(tree.duel)
        tree.use(chr(2000 + i))
        assert before - len(tree.duel) < 64
    assert max(held(tree)) <= 200


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
    assert tree.duel.ahead < 0


def test_what_was_learned_leads_where_all_is_alike_once_it_has_found_as_much_as_there_is_room_for() -> None:
    for requests, leads in ((lately(150), False), (lately(230), True), (once(300), False)):
        run = runtime("p2c", device=400)
        for now, text in requests:
            run.core.at(now)
            run.insert(text)
        policy = run.core.world.policy
        assert isinstance(policy, P2c)
        assert policy.duel.leads is leads
    tree = new(30, prefer_the_old())
    for _ in range(20):
        assert not tree.use("abc"), "nothing was learned yet"
    tree.duel.begin()
    assert [tree.use("abc") for _ in range(12)] == [False] * 9 + [True] + [False] * 2
    assert tree.duel.leads


def test_no_single_request_changes_the_lead_of_a_small_cache() -> None:
    tree = new(60, prefer_the_old())
    seen: list[int] = []
    while not tree.duel.leads:
        number = tree.now // 1_000_000
        tree.use("abcdef"[number % 6] * 3, chr(0x4E00 + number) * 12)
        seen.append(tree.duel.ahead)
    assert 0 < seen[-2] < 15 <= seen[-1], "what a request asks for"


@pytest.mark.parametrize(("pages", "bound"), [(12, 2 * 3), (16 * 12, 12)])
def test_what_was_long_ago_counts_for_no_more_than_the_bound(pages: int, bound: int) -> None:
    """A sixteenth of the room, or twice what a request asks for."""
    tree = new(pages, prefer_the_old())
    for _ in range(30):
        for text in range(pages // 2):
            tree.use(chr(0x4E00 + text) * 3)
    assert tree.duel.ahead == bound


def test_of_a_node_that_was_divided_both_parts_are_known() -> None:
    tree = new(12)
    tree.use("abcd")
    tree.use("ab", "xy")
    assert held(tree) == (6, 6), "what was not used is there still"
    assert len(tree.duel) == 3
    tree.use("ab", "cd")
    assert held(tree) == (6, 6)
    assert len(tree.duel) == 3


def test_of_a_node_that_was_divided_the_part_that_was_not_used_goes_first() -> None:
    tree = new(8)
    tree.use("abcd")
    tree.use("ab", "xy")
    tree.use("mnop")
    assert held(tree) == (8, 8)
    tree.use("qr")
    assert held(tree) == (8, 8), "both gave up the two pages that were used once"
    assert sorted(one.pages for one in tree.duel._seen.values()) == [2, 2, 4]


def test_a_node_that_comes_back_with_other_pages_is_another() -> None:
    """What is remembered of a node that left has its number; what comes back may be longer, or begin elsewhere."""
    tree = new(24)
    tree.use("abcdef")
    number = tree.node(tree.root, "abcdef").heat
    longer = Node(spell("abcdefgh"), 8, tree.root, 1)
    other = Node(spell("ef"), 6, Node(spell("wxyz"), 4, tree.root, 1), 1)
    for one, pages in ((longer, 8), (other, 2)):
        one.heat = number
        tree.now += 1_000_000
        tree.duel.use([(one, 0)], tree.now)
        check_duel(tree.duel)
        assert one.heat != number
        assert tree.duel._seen[one.heat >> HEAT_BITS].pages == pages


def usual(count: int, share: float) -> _Usual:
    """So many requests, of which every second one finds ``share``."""
    found = _Usual()
    for number in range(count):
        assert not found.falls(share * (number % 2))
    return found


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_where_no_more_is_found_that_is_noticed_within_a_few_dozen_requests(share: float) -> None:
    found = usual(400, share)
    assert any(found.falls(0.0) for _ in range(40))


def test_a_few_misses_in_a_row_are_chance() -> None:
    found, draw = _Usual(), random.Random(1)
    assert not any(found.falls(float(draw.random() < 0.5)) for _ in range(20_000))
    assert not any(found.falls(0.0) for _ in range(8))


def test_where_little_is_found_nothing_can_fall() -> None:
    found, draw = _Usual(), random.Random(2)
    for _ in range(2_000):
        assert not found.falls(draw.random() * (draw.random() < 0.1))
    assert not any(found.falls(0.0) for _ in range(500))


def test_what_is_usual_is_not_known_before_a_hundred_requests() -> None:
    assert not any(usual(60, 1.0).falls(0.0) for _ in range(40))


def test_who_leads_loses_that_when_what_was_kept_is_asked_for_no_more() -> None:
    tree = new(60, prefer_the_old())
    for _ in range(40):
        for text in "abcdef":
            tree.use(text * 3, text.upper() * 12)
    assert tree.duel.leads
    ahead, changes = tree.duel.ahead, 0
    assert ahead > 0
    for number in range(40):
        changes += tree.use(chr(0x4E00 + number) * 15)
        if not tree.duel.ahead:
            break
        assert tree.duel.ahead == ahead, "neither finds anything"
    assert changes == 1
    assert not tree.duel.leads
    assert tree.duel.ahead == 0


def test_while_it_is_in_doubt_whether_less_is_found_the_oldest_goes_and_the_lead_is_not_lost() -> None:
    tree = new(60, prefer_the_old())
    for _ in range(40):
        for text in "abcdef":
            tree.use(text * 3, text.upper() * 12)
    ahead, misses = tree.duel.ahead, 0
    while tree.duel.leads:
        tree.use(chr(0x4E00 + misses) * 15)
        misses += 1
    assert misses < 8 < 16, "much sooner than it is sure"
    assert tree.duel.ahead == ahead
    for _ in range(10):
        for text in "abcdef":
            tree.use(text * 3, text.upper() * 12)
    assert tree.duel.leads, "what was usual is found again"




def test_what_was_ended_leaves_both() -> None:
    tree = new(12)
    tree.use("ab", "cd")
    tree.use("ab", "ef")
    for first, second in (("ab", "cd"), ("ab", "ef")):
        tree.duel.end(tree.node(tree.node(tree.root, first), second))
        check_duel(tree.duel)
    assert held(tree) == (2, 2)
    tree.duel.end(tree.node(tree.root, "ab"))
    assert len(tree.duel._seen) == 0


def test_of_large_caches_only_some_nodes_are_drawn() -> None:
    big = Duel(64 * policies._MOST_PAGES, prefer_the_old(), _EDGES)
    drawn = sum(big.draw() > 0 for _ in range(64_000))
    assert 850 <= drawn <= 1150
    assert big._room == policies._MOST_PAGES
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
        check_books(run.core)
        assert len(policy.duel._seen) <= 2 * 40


@pytest.mark.source
def test_as_long_as_it_does_not_lead_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(duel: Duel, path: object, now: int) -> bool:
        return False

    monkeypatch.setattr(Duel, "use", stays)
    monkeypatch.setattr(Duel, "begin", lambda duel: None)
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
    assert world.shelves[world.count].policy is world.policy


@pytest.mark.parametrize("host", [0, 8])
def test_windows_and_states_go_by_recency_because_uses_of_a_node_are_no_uses_of_the_state_at_its_end(host: int) -> None:
    """With states chosen by the uses of their nodes, 600 requests of a chat on all three components found .27 of their
    tokens, where ``lru`` found .41."""
    world = runtime("p2c", "full,swa,mamba", device=16, host=host).core.world
    first, *others = world.shelves[world.count if host else 0 :][: world.count]
    assert first.policy is world.policy
    assert [type(shelf.policy) for shelf in others] == [Lru, Lru]
    assert [len(shelf.orders[LATE].rest) for shelf in (first, *others)] == [len(CLASSES), 1, 1]


class Oldest(EvictionPolicy):
    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].oldest() if order.rest[0].slices else None


class OldestOfFull(Oldest):
    full_only = True


@pytest.mark.parametrize(("policy", "count"), [(Oldest, 3), (OldestOfFull, 1)])
def test_a_policy_of_ones_own_chooses_among_windows_and_states_unless_it_says_otherwise(
    policy: type[EvictionPolicy], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "own", lambda config: policy())
    world = runtime("own", "full,swa,mamba", device=16).core.world
    assert sum(type(shelf.policy) is policy for shelf in world.shelves[: world.count]) == count


TEXTS = ("abcd", "efgh", "ijkl", "ABCD", "EFGH", "IJKL")


def filled(*, storage: bool, **options: Any) -> SynchronousRuntime:
    """Device and host are full, of different pages; the last request's conversation has ended."""
    run = runtime("lru", device=12, host=8, storage=storage, **options)
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


def path_of(run: SynchronousRuntime, text: str) -> list[Node]:
    """The nodes of one text. Unlike a match this does not use them."""
    (root,) = run.core.world.roots.values()
    return walk(root, spell(text, run.page), 0, run.core.world.page_bytes)[0]


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


def make_room(run: SynchronousRuntime) -> None:
    """Have the device give something up for another request, which may have to wait for backups."""
    for _ in range(4):
        request = run.lease(spell("uvwx", run.page))
        run.settle()
        if request is not None:
            return


def test_what_was_given_up_is_asked_again_when_a_store_comes() -> None:
    """It was condemned ahead of time, because the host had no room for it and nobody else wanted it."""
    run = filled(storage=False, write_policy="write_back", write_back_watermark=0.5)
    run.insert("qrst")
    run.settle()
    assert path_of(run, "mnop")[0].condemned
    run.core.attach_storage(Access.WRITE)
    make_room(run)
    run.flush()
    stored = {digest for component, digest in run.storage if component == FULL}
    assert stored >= set(run.chain(SPACE, spell("mnop", 512)))


def test_what_was_given_up_is_asked_again_when_the_host_has_room() -> None:
    run = filled(storage=False, write_policy="write_back", write_back_watermark=0.5)
    run.insert("qrst")
    run.settle()
    world = run.core.world
    assert path_of(run, "mnop")[0].condemned
    for text in TEXTS:
        for node in path_of(run, text):
            if node.state[1] == PRESENT:
                world.vacate(node, 1)
                world.remove_if_empty(node, 1)
    make_room(run)
    assert run.reach("mnop") == (0, 4)


def leaf_with_a_copy_of_full_alone(run: SynchronousRuntime) -> Node:
    """The leaf of "abcd": on the device it has all components, on the host FULL. The host is full; it alone has
    "efgh"."""
    world = run.core.world
    for text in ("efgh", "abcd"):
        run.insert(text, checkpoint=4, states=2)
        run.settle()
    *above, leaf = path_of(run, "abcd")
    only_on_host = [(node, c) for node in reversed(path_of(run, "efgh")) for c in (2, 1, 0)]
    only_on_device = [(leaf, 5), (leaf, 4), *((node, 4) for node in above)]
    for node, place in (*only_on_host, *only_on_device):
        if node.state[place] == PRESENT:
            world.vacate(node, place)
    for shelf in world.shelves[world.count :]:
        shelf.slots.take(shelf.slots.left)
    assert [state == PRESENT for state in leaf.state] == [True] * 4 + [False] * 2
    return leaf


class Sooner(Lru):
    """A policy to which ``wanted`` components of anything are worth more than what the host has."""

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = wanted

    def sooner(self, node: Node, other: Node, c: int, now: int, share: float) -> bool:
        return c not in self.wanted


@pytest.mark.source
@pytest.mark.parametrize(
    ("wanted", "verdict"), [((), Verdict.OUTDONE), ((1,), Verdict.UNSAVED), ((2,), Verdict.OUTDONE)]
)
def test_of_a_leaf_the_first_component_without_a_copy_says_whether_it_is_copied(
    wanted: Sequence[int], verdict: Verdict
) -> None:
    """A state whose own copy would go first takes its window along, which the host would keep. A state that the host
    would keep goes there with the window before it."""
    run = runtime("lru", "full,swa,mamba", device=16, host=16, states=4, storage=False, window=1024)
    leaf = leaf_with_a_copy_of_full_alone(run)
    for shelf in run.core.world.shelves:
        shelf.policy = Sooner(wanted)
    assert run.core._transfers.room.judge(leaf, 2) is verdict


def test_what_goes_with_a_cell_that_was_given_up_is_not_lost_either() -> None:
    """A window that no copy was wanted of takes the state of its node along. FULL stays, for there is more below it."""
    run = runtime("lru", "full,swa,mamba", device=16, host=16, states=4, storage=False, window=1024)
    run.insert("abcd", checkpoint=4, states=2)
    run.insert("abcdef", states=1)
    run.settle()
    node, world = path_of(run, "abcd")[-1], run.core.world
    for place in (5, 4):
        if node.state[place] == PRESENT:
            world.vacate(node, place)
    assert [state == PRESENT for state in node.state] == [True] * 4 + [False] * 2
    run.core._transfers.room._evict_outdone(node, 1)
    assert [state == PRESENT for state in node.state] == [True, False, False, True, False, False]
    assert world.counters.lost_pages == 0
