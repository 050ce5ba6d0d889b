"""``p2c``: what it learns, and its duel with ``lru``."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest

from asynccache.core import policies
from asynccache.core.cache import CacheCore, Grant, LeaseRequest
from asynccache.core.eviction import EvictionPolicy, Learned, Lru, Order
from asynccache.core.policies import (
    _EDGES,
    BINS,
    CLASSES,
    HEAT_BITS,
    HEAT_MASK,
    POLICIES,
    Curves,
    Duel,
    P2c,
    _Usual,
    bin_of,
)
from asynccache.core.room import Verdict
from asynccache.core.settings import Access
from asynccache.core.tree import PRESENT, Node, Root, cut, link
from asynccache.core.world import LATE
from tests.core.core_kit import granted, insert, saved, written
from tests.simulated.leading import check_books, check_duel
from tests.simulated.synchronous import FULL, SPACE, SynchronousRuntime, core_config, spell

# ``p2c``: what it learns, that it stays near to LRU where nothing can be learned, and that its memory is bounded.


Requests = Sequence[tuple[float, str]]


def runtime(eviction: str, components: str = "full", **options: Any) -> SynchronousRuntime:
    settings: dict[str, Any] = {"host": 0, "eviction": eviction, "page_size": 512} | options
    run = SynchronousRuntime(core_config(components, **settings))
    run.audit = lambda idle=False: None  # type: ignore[method-assign]
    return run


def policy_of(run: SynchronousRuntime) -> P2c:
    policy = run.core.world.policy
    assert isinstance(policy, P2c)
    return policy


def what_is_learned(run: SynchronousRuntime) -> Learned:
    learned = run.core.learned()
    assert learned is not None
    return learned


def asked(run: SynchronousRuntime, *requests: tuple[float, str]) -> SynchronousRuntime:
    """Whole requests, each at its time."""
    for now, text in requests:
        run.core.at(now)
        run.insert(text)
    return run


def judged(run: SynchronousRuntime, text: str) -> list[tuple[str, float, float]]:
    """What the policy thinks of each run of a prompt; ages in seconds, to the millisecond."""
    found = [one.judged for one in run.core.explain(SPACE, spell(text, 512)).runs]
    return [(one.kind, round(one.age, 3), one.worth) for one in found if one is not None]


def hits(eviction: str, requests: Requests, device: int) -> float:
    """The share of all pages that were found, one request at a time, without a host."""
    core = CacheCore(core_config(device=device, host=0, eviction=eviction, page_size=512, publish=False))
    found = 0
    for now, text in requests:
        core.at(now)
        found += served(core, spell(text, 512)) // 512
    return found / sum(len(text) for _, text in requests)


def served(core: CacheCore, key: bytes) -> int:
    """A whole request; how many of its tokens were found."""
    tokens = len(key) // 4
    grant = core.lease(LeaseRequest(SPACE, key, tokens, tokens, tokens))
    assert isinstance(grant, Grant)
    core.commit(grant.lease, key, b"")
    core.release(grant.lease)
    return grant.lease.cached


def fresh(start: int, pages: int) -> str:
    """A text that nothing else begins with."""
    return "".join(chr(0x4E00 + start) if not i else chr(0x2000 + i) for i in range(pages))


def once(count: int = 600) -> Requests:
    """Nothing is asked for twice."""
    return [(i * 0.5, fresh(i, 4)) for i in range(count)]


def lately(count: int, seed: int = 1) -> Requests:
    """Mostly what was asked for a short while ago."""
    draws, texts, asked = random.Random(seed), [fresh(i, 4) for i in range(60)], []
    for number in range(count):
        text = texts.pop(min(len(texts) - 1, int(draws.expovariate(1 / 10))))
        texts.insert(0, text)
        asked.append((number * 0.5, text))
    return asked


def conversations(count: int, seed: int = 2) -> Requests:
    """One-off prompts between conversations that come back after a while, each a page longer."""
    draws, asked = random.Random(seed), []
    waiting: list[tuple[float, str]] = []
    for number in range(count):
        now = number * 0.5
        if waiting and waiting[0][0] <= now:
            _, text = waiting.pop(0)
            text += chr(0x3000 + len(text))
        else:
            text = fresh(number, 4)
        if draws.random() < 0.3 or 4 < len(text) < 12:
            waiting.append((now + 20, text))
        asked.append((now, text))
    return asked


def loop(count: int) -> Requests:
    """More texts in turn than there is room for: of these LRU keeps none in time."""
    return [(i * 0.5, fresh(i % 40, 4)) for i in range(count)]


def then(first: Requests, second: Requests) -> Requests:
    """Another workload from then on."""
    return [*first, *((first[-1][0] + 1 + at, text) for at, text in second)]


WORKLOADS: dict[str, Callable[[], Requests]] = {
    "nothing twice": once,
    "what was lately": lambda: lately(600),
    "a hundred": lambda: lately(99),
    "turns after what was lately": lambda: then(lately(300), conversations(600)),
    "turns after a loop": lambda: then(loop(300), conversations(600)),
    "what was lately after a loop": lambda: then(loop(300), lately(600)),
    "what was lately after nothing twice": lambda: then(once(300), lately(600)),
    "a loop after what was lately": lambda: then(lately(600), loop(600)),
    "what was lately after turns": lambda: then(conversations(300), lately(600)),
}


@pytest.mark.parametrize("device", [16, 40, 120, 400])
@pytest.mark.parametrize("what", WORKLOADS)
def test_it_is_never_far_below_lru(what: str, device: int) -> None:
    """By .2 points at most. At 16 pages it is .22 after two of the changes: 8 of 3,600 pages, two requests' worth."""
    requests = WORKLOADS[what]()
    assert hits("p2c", requests, device) >= hits("lru", requests, device) - (0.0023 if device == 16 else 0.002)


def test_it_keeps_what_comes_back_where_lru_keeps_what_was_last() -> None:
    assert hits("lru", loop(1500), 80) == 0.0
    assert hits("p2c", loop(1500), 80) > 0.05


def test_the_first_hundred_requests_are_those_of_lru() -> None:
    for requests in (conversations(99), lately(99), loop(99)):
        assert hits("p2c", requests, 40) == hits("lru", requests, 40)


def test_ghosts_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "_MOST_GHOSTS", 50)
    for device, most in ((16, 8 * 16 // 4), (400, 50)):
        learned = what_is_learned(asked(runtime("p2c", device=device), *once(400)))
        assert learned.ghosts == most
        assert learned.returned == 0


def memory(eviction: str, nodes: int) -> tuple[int, int, int]:
    """The bytes that a core takes with so many nodes of two pages, those of its duel, and how many nodes that knows.
    Each request comes once, and nothing is evicted."""
    core, draws = CacheCore(core_config(device=6 * nodes, host=0, eviction=eviction, publish=False)), random.Random(1)
    tracemalloc.start()
    for number in range(nodes):
        core.at(number * 0.5)
        served(core, draws.randbytes(32))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    watched, policy = 0, core.world.policy
    if isinstance(policy, P2c):
        watched = len(policy.duel)
        assert core.learned().watched == watched  # type: ignore[union-attr]
        policy.duel = Duel(1, policy.curves.worth, [0])
        gc.collect()
    duel = used - tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used, duel, watched


def test_a_node_takes_at_most_96_bytes_more_than_under_lru_besides_ghosts() -> None:
    """The duel's entries are ghosts, too: they stand for no data, whether or not the cache has their nodes, there are
    no more than both small caches have room for, and ``watched`` counts them. In small trees the curves, which are as
    large in any, are most of the rest."""
    nodes = 2000
    (lru, _, _), (p2c, duel, watched) = memory("lru", nodes), memory("p2c", nodes)
    assert (p2c - duel - lru) / nodes <= 96
    assert watched == nodes, "it fits in both"
    assert duel / watched <= 432, "as much as another ghost takes"


def test_the_line_of_ghosts_has_few_that_came_back_and_no_eviction_clears_all_of_it() -> None:
    """A small cache in a loop: every ghost comes back, and leaves again."""
    run = runtime("p2c", device=64)
    policy = policy_of(run)
    for request in loop(3000):
        asked(run, request)
        assert policy._held <= policy._most_pages
        assert len(policy._fifo) <= policy._most_ghosts


def test_what_comes_back_is_known_again_and_goes_on_from_where_it_was() -> None:
    run = runtime("p2c", device=12)
    asked(run, *enumerate(("abcd", "abcdef", "mnopqrst", "uvwxyz12", "abcdef")))
    assert policy_of(run).returned > 0
    node = path_of(run, "abcd")[0]
    assert node.end == 4, "it is cut where it was cut before"
    assert (node.heat & HEAT_MASK) >> 3 == 3


def test_a_use_counts_at_its_age_and_what_forks_is_a_class_of_its_own() -> None:
    run = asked(runtime("p2c", device=64), (1.0, "abcd"), (11.0, "abcd"), (31.0, "abXY"), (32.0, "abZZ"))
    learned = what_is_learned(run)
    used = {curve.name: {k: count for k, count in enumerate(curve.used) if count} for curve in learned.curves}
    assert used["used once"] == {bin_of(10_000_000): pytest.approx(4)}
    assert used["used twice"] == {bin_of(20_000_000): pytest.approx(2)}
    assert used["forked once"] == {bin_of(1_000_000): pytest.approx(2)}
    assert sum(curve.reached[0] for curve in learned.curves) == pytest.approx(4 + 4 + 4 + 4)


def test_curves_tell_the_share_that_comes_back_before_an_age() -> None:
    """Of eight texts four come back after 10 s and two more after 100 s."""
    run = runtime("p2c", device=64)
    texts = [fresh(i, 2) for i in range(8)]
    for now, again in ((1.0, texts), (11.0, texts[:4]), (101.0, texts[4:6]), (401.0, [])):
        run.core.at(now)
        insert(run, *again)
    learned = what_is_learned(run)
    once = next(curve for curve in learned.curves if curve.name == "used once")
    by_age = {age: once.again[bin_of(int(age * 1e6))] for age in (5, 20, 90, 300)}
    assert by_age == {5: 0.0, 20: pytest.approx(0.5), 90: pytest.approx(0.5), 300: pytest.approx(0.75)}
    assert list(once.again) == sorted(once.again)
    assert (learned.requests, learned.lessons) == (14, 0)
    assert len(once.again) == len(once.used) == len(once.reached) == len(once.worth) == len(learned.edges) == BINS


def test_each_run_of_a_prompt_is_judged_and_what_was_ended_is_worth_nothing() -> None:
    run = asked(runtime("p2c", device=64), (1.0, "abcd"), (3.0, "abXY"), (4.0, "abXY"))
    run.core.at(10.0)
    first, *others = judged(run, "abXY")
    assert first == ("forked once", 6.0, 1.0)
    assert set(others) == {("used twice", 6.0, 1.0)}
    insert_and_end(run, "mnop")
    run.core.at(12.0)
    assert judged(run, "mnop") == [("used once", 2.0, 0.0)]


def test_a_policy_that_does_not_learn_says_nothing(mru: None) -> None:
    for name in ("lru", "mru"):
        run = runtime(name, device=16)
        run.insert("abcd")
        assert run.core.learned() is None
        assert [one.judged for one in run.core.explain(SPACE, spell("abcd", 512)).runs] == [None]


def test_without_a_clock_nothing_ages() -> None:
    run = runtime("p2c", device=16)
    insert(run, *(text for _, text in lately(300)))
    learned = what_is_learned(run)
    assert not any(any(curve.used[1:]) for curve in learned.curves)


def test_worth_rises_and_then_falls_and_is_less_where_less_is_used_again() -> None:
    curves = Curves()
    for second in range(1, 400):
        now = second * 1_000_000
        curves.begin(0, 100.0)
        curves.begin(1, 100.0)
        curves._begin_cohort(now)
        if second > 10:
            curves.use(1, now - 10_000_000, now, 90.0)
    curves.learn(400_000_000)
    assert len(curves.worth) == len(CLASSES)
    for worth in curves.worth:
        peak = worth.index(max(worth))
        assert len(worth) == BINS
        assert worth == sorted(worth[:peak]) + sorted(worth[peak:], reverse=True)
    at = bin_of(9_000_000)
    assert curves.worth[1][at] > 3 * curves.worth[0][at]


def test_a_cell_waits_in_the_queue_of_its_class_as_soon_as_it_was_used() -> None:
    run = runtime("p2c", device=64)
    world = run.core.world
    for request in enumerate(("abcd", "abcd", "abcd", "abcdef", "mnop", "abcdef")):
        part = (node := path_of(asked(run, request), request[1])[-1]).entry[0]
        assert part is not None
        assert part.queue is world.queue(node, 0, LATE)
    assert {(node.heat & HEAT_MASK) >> 3 for _, node in world.shelves[0].orders[LATE].entries()} == {1, 2}


@pytest.mark.source
def test_a_choice_that_is_not_worked_out_again_is_the_one_that_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice is the cheapest of all ends, and of equally cheap ones the oldest, worked out from nothing."""
    monkeypatch.setattr(Duel, "use", lambda duel, path, now: False)
    run = runtime("p2c", device=40)
    policy_of(run).duel.leads = True
    choose, chosen = P2c.choose, 0

    def check(policy: P2c, order: Order, now: int) -> Node | None:
        nonlocal chosen
        node = choose(policy, order, now)
        ends = [
            (policy.curves.worth[kind][bin_of(now - part.stamps[at])], queue.chunks[0].stamps[0], kind, part.nodes[at])
            for kind, queue in enumerate(order.rest) if queue.chunks
            for part, at in ((queue.chunks[0], 0), (queue.chunks[-1], -1))
        ]  # fmt: skip
        if ends:
            worth, stamp, kind, _ = min(ends, key=lambda end: end[:3])
            assert any(node is end[3] for end in ends if end[:3] == (worth, stamp, kind))
            chosen += 1
        return node

    monkeypatch.setattr(P2c, "choose", check)
    asked(run, *conversations(500))
    assert chosen > 500


class Mru(EvictionPolicy):
    """Most recently used first: a policy of somebody's own."""

    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].newest() if order.rest[0].chunks else None


@pytest.fixture
def mru(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mru", lambda config: Mru())


def test_a_policy_of_ones_own_chooses(mru: None) -> None:
    run = runtime("mru", device=12)
    insert(run, "abcd", "efgh", "ijkl", "mnop")
    assert [run.reach(text)[0] for text in ("abcd", "efgh", "ijkl", "mnop")] == [4, 4, 0, 4]


class Forgetful(EvictionPolicy):
    """Has two queues, and looks at one."""

    queues = 2

    def queue(self, node: Node, c: int) -> int:
        return node.end & 1

    def choose(self, order: Order, now: int) -> Node | None:
        return order.rest[0].oldest() if order.rest[0].chunks else None


@pytest.mark.usefixtures("breaks_a_core")
def test_a_policy_that_overlooks_a_queue_is_told_so_instead_of_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "forgetful", lambda config: Forgetful())
    run = runtime("forgetful", device=3)
    run.insert("abc")
    with pytest.raises(AssertionError, match="a policy chooses while a candidate waits"):
        run.insert("def")


def insert_and_end(run: SynchronousRuntime, text: str) -> None:
    written(run, text).release(ended=True)


def test_what_was_ended_goes_before_a_policy_is_asked(mru: None) -> None:
    run = runtime("mru", device=12)
    insert_and_end(run, "abcd")
    insert(run, "efgh", "ijkl", "mnop")
    assert [run.reach(text)[0] for text in ("abcd", "efgh", "ijkl", "mnop")] == [0, 4, 4, 4]


@pytest.mark.parametrize("alphabet", ["a", "ab", "abcdefgh"])
def test_nothing_is_missed_that_never_waited_where_prompts_repeat_their_pages(alphabet: str) -> None:
    """Equal pages in a row: nodes that begin at different places of a prompt may have the same name as ghosts."""
    run, draw, now = runtime("p2c", device=40), random.Random(alphabet), 1.0
    for _ in range(600):
        now += draw.expovariate(1.0)
        run.core.at(now)
        run.insert("".join(draw.choice(alphabet) for _ in range(draw.randint(1, 30))))
        if draw.random() < 0.1:
            run.insert("".join(chr(0x3000 + draw.randrange(10_000)) for _ in range(35)))
    for curve in what_is_learned(run).curves:
        assert all(count >= -1e-6 for count in curve.reached), curve.name
        assert all(after <= before + 1e-6 for before, after in pairwise(curve.reached))


def test_who_looks_at_what_was_learned_does_not_turn_the_clock() -> None:
    run = asked(runtime("p2c"), (100.0, "abc"))
    before = run.core.world.recency.time
    run.core.learned(50.0)
    run.core.learned(200.0)
    assert run.core.world.recency.time == before


# The duel of ``p2c`` with ``lru``: who leads, what both small caches hold, and that the books of both are right.


class Tree:
    """Paths of nodes as a cache would hand them over; nothing leaves it. Each letter is a page. ``pages``: what each of
    the two small caches has room for."""

    def __init__(self, pages: int, worth: list[list[float]] | None = None) -> None:
        self.duel = Duel(pages, worth or [[1.0] * BINS for _ in CLASSES], _EDGES)
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

    def use(self, *texts: str) -> bool:
        """A request over nodes with these texts, in a row."""
        path: list[Node] = [self.root]
        for text in texts:
            path.append(self.node(path[-1], text))
        self.now += 1_000_000
        changed = self.duel.use([(node, 0) for node in path[1:] if node.heat >> HEAT_BITS], self.now)
        check_duel(self.duel)
        return changed


def held(tree: Tree) -> tuple[int, int]:
    return tree.duel._held_lately, tree.duel._held_worthy


def test_both_hold_as_much_as_there_is_room_for_and_what_is_used_stays() -> None:
    tree = Tree(8)
    for text in ("abc", "def", "ghi", "jkl"):
        tree.use(text)
        assert max(held(tree)) <= 8
    assert held(tree) == (6, 6)


def test_a_long_prompt_after_many_small_nodes_makes_room_in_several_calls() -> None:
    tree = Tree(200)
    for i in range(200):
        tree.use(chr(1000 + i))
    tree.use("a" * 150)
    assert held(tree) == (286, 286), "64 nodes at a time"
    for i in range(10):
        before = len(tree.duel)
        tree.use(chr(2000 + i))
        assert before - len(tree.duel) < 64
    assert max(held(tree)) <= 200


PREFER_THE_OLD = [[float(k) for k in range(BINS)] for _ in CLASSES]
"""What was used just now is worth least."""


def test_who_finds_more_leads_and_who_finds_less_does_not() -> None:
    tree = Tree(12, PREFER_THE_OLD)
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
        assert policy_of(asked(runtime("p2c", device=400), *requests)).duel.leads is leads
    tree = Tree(30, PREFER_THE_OLD)
    for _ in range(20):
        assert not tree.use("abc"), "nothing was learned yet"
    tree.duel.begin()
    assert [tree.use("abc") for _ in range(12)] == [False] * 9 + [True] + [False] * 2
    assert tree.duel.leads


def test_no_single_request_changes_the_lead_of_a_small_cache() -> None:
    tree = Tree(60, PREFER_THE_OLD)
    seen: list[int] = []
    while not tree.duel.leads:
        number = tree.now // 1_000_000
        tree.use("abcdef"[number % 6] * 3, chr(0x4E00 + number) * 12)
        seen.append(tree.duel.ahead)
    assert 0 < seen[-2] < 15 <= seen[-1], "what a request asks for"


@pytest.mark.parametrize(("pages", "bound"), [(12, 2 * 3), (16 * 12, 12)])
def test_what_was_long_ago_counts_for_no_more_than_the_bound(pages: int, bound: int) -> None:
    """A sixteenth of the room, or twice what a request asks for."""
    tree = Tree(pages, PREFER_THE_OLD)
    for _ in range(30):
        for text in range(pages // 2):
            tree.use(chr(0x4E00 + text) * 3)
    assert tree.duel.ahead == bound


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


def leading_tree() -> Tree:
    """Of a loop that does not fit, the oldest is worth most."""
    tree = Tree(60, PREFER_THE_OLD)
    around(tree, 40)
    assert tree.duel.leads
    assert tree.duel.ahead > 0
    return tree


def around(tree: Tree, times: int) -> None:
    for _ in range(times):
        for text in "abcdef":
            tree.use(text * 3, text.upper() * 12)


def test_who_leads_loses_that_when_what_was_kept_is_asked_for_no_more() -> None:
    tree = leading_tree()
    ahead, changes = tree.duel.ahead, 0
    for number in range(40):
        changes += tree.use(chr(0x4E00 + number) * 15)
        if not tree.duel.ahead:
            break
        assert tree.duel.ahead == ahead, "neither finds anything"
    assert changes == 1
    assert not tree.duel.leads
    assert tree.duel.ahead == 0


def test_while_it_is_in_doubt_whether_less_is_found_the_oldest_goes_and_the_lead_is_not_lost() -> None:
    tree = leading_tree()
    ahead, misses = tree.duel.ahead, 0
    while tree.duel.leads:
        tree.use(chr(0x4E00 + misses) * 15)
        misses += 1
    assert misses < 8 < 16, "much sooner than it is sure"
    assert tree.duel.ahead == ahead
    around(tree, 10)
    assert tree.duel.leads, "what was usual is found again"


def test_of_large_caches_only_some_nodes_are_drawn() -> None:
    big = Duel(64 * policies._MOST_PAGES, PREFER_THE_OLD, _EDGES)
    drawn = sum(big.draw() > 0 for _ in range(64_000))
    assert 850 <= drawn <= 1150
    assert big._room == policies._MOST_PAGES
    assert all(Duel(1000, PREFER_THE_OLD, _EDGES).draw() for _ in range(100))


@pytest.mark.parametrize("seed", range(6))
def test_its_books_are_right_after_every_request(seed: int) -> None:
    run, draw = runtime("p2c", device=40), random.Random(seed)
    policy = policy_of(run)
    for number in range(300):
        run.core.at(number)
        text = "".join(draw.choice("abc") for _ in range(draw.randrange(1, 12)))
        if draw.random() < 0.2:
            insert_and_end(run, text)
        else:
            run.insert(text)
        check_books(run.core)
        assert len(policy.duel._seen) <= 2 * 40


def test_the_duel_gives_up_a_conversation_that_has_ended() -> None:
    run = runtime("p2c", device=40)
    policy = policy_of(run)
    run.insert("abc")
    known = len(policy.duel._seen)
    insert_and_end(run, "xyz")
    assert len(policy.duel._seen) == known == 1
    insert_and_end(run, "abc")
    assert not policy.duel._seen


@pytest.mark.source
def test_as_long_as_it_does_not_lead_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Duel, "use", lambda duel, path, now: False)
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


@pytest.mark.parametrize(("full_only", "count"), [(False, 3), (True, 1)])
def test_a_policy_of_ones_own_chooses_among_windows_and_states_unless_it_says_otherwise(
    full_only: bool, count: int, mru: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full_only:
        monkeypatch.setattr(Mru, "full_only", True)
    world = runtime("mru", "full,swa,mamba", device=16).core.world
    assert sum(type(shelf.policy) is Mru for shelf in world.shelves[: world.count]) == count


TEXTS = ("abcd", "efgh", "ijkl", "ABCD", "EFGH", "IJKL")


def filled(**options: Any) -> SynchronousRuntime:
    """Device and host are full, of different pages; the last request's conversation has ended."""
    run = runtime("lru", device=12, host=8, storage=False, **options)
    saved(run, *TEXTS)
    request = run.lease(spell("mnop", run.page))
    if request is None:  # it had to wait for backups
        run.settle()
        request = granted(run, "mnop")
    request.compute(4 * run.page)
    assert request.commit()
    request.release(ended=True)
    run.settle()
    return run


def path_of(run: SynchronousRuntime, text: str) -> list[Node]:
    """The nodes of one text. Unlike a match this does not use them."""
    return run.core.world.find(SPACE, spell(text, run.page))[0]


def on_host(run: SynchronousRuntime) -> list[str]:
    return [text for text in (*TEXTS, "mnop") if run.reach(text) == (0, 4)]


def test_what_would_go_from_the_host_before_all_that_is_there_is_not_copied_to_it() -> None:
    """A conversation that has ended leaves the device without a copy, and nothing is lost that somebody wants."""
    run = filled()
    saved(run, "qrst")
    assert run.reach("mnop") == (0, 0)
    assert on_host(run) == ["ijkl", "ABCD"], "which were there before"
    assert run.core.statistics().lost_pages == 0


def test_what_was_given_up_is_asked_again_when_a_store_comes() -> None:
    """It was condemned ahead of time, because the host had no room for it and nobody else wanted it."""
    run = filled(write_policy="write_back", write_back_watermark=0.5)
    saved(run, "qrst")
    assert path_of(run, "mnop")[0].condemned
    run.core.attach_storage(Access.WRITE)
    saved(run, "uvwx")
    run.flush()
    stored = {digest for component, digest in run.storage if component == FULL}
    assert stored >= set(run.chain(SPACE, spell("mnop", 512)))


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
@pytest.mark.usefixtures("breaks_a_core")
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
