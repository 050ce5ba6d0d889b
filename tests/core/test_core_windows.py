"""Which windows and states stay when their pools are short: those of the ends that the next match is likely to have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from asynccache.core.cache import Grant
from asynccache.core.eviction import Recency
from asynccache.core.match import Matches
from asynccache.core.tree import ABSENT, PRESENT, Node, walk
from asynccache.core.world import World
from tests.simulated.synchronous import SynchronousRuntime, core_config, spell

OTHER = "qrstuvwx"


def runtime(swa: int, states: int = 16, components: str = "full,swa", window: int = 2) -> SynchronousRuntime:
    """No host; ``swa`` pages and ``states`` states for it on the device; ``window`` in pages."""
    config = core_config(components, device=64, host=0, window=4 * window, states=states)
    slots = [replace(c, device=swa) if c.window else c for c in config.components]
    return SynchronousRuntime(replace(config, components=tuple(slots)))


def reach(run: SynchronousRuntime, *texts: str) -> list[int]:
    return [run.reach(text)[0] for text in texts]


def take(run: SynchronousRuntime, swa: int = 0, states: int = 0) -> None:
    """A request that needs so many SWA pages and states, and nothing else."""
    answer = run.core.lease(run.ask(b"", states=states)._replace(reserve=0, reserve_swa=swa * run.page))
    assert isinstance(answer, Grant)
    run.perform(answer.plan)


def short_windows() -> None:
    """Of two prompts of eight pages, ends need two each; the other twelve are given up."""
    run = runtime(swa=16)
    run.insert("abcdefgh")
    run.insert(OTHER)
    take(run, swa=12)
    assert reach(run, "abcdefgh", OTHER) == [8, 8]


def an_end_that_somebody_went_on_from() -> None:
    """Its window goes before an older one that nobody went on from."""
    run = runtime(swa=24)
    run.insert(OTHER)
    run.insert("abcdefgh")
    run.insert("abcdefghijklmnop")
    take(run, swa=20)
    assert reach(run, OTHER, "abcdefghijklmnop") == [8, 16]


def a_fork() -> None:
    """What texts have in common ends where they fork. It is used with the second, so after the end of the first."""
    texts = "abcdefghijkl", "abcdefgh" + OTHER[:4]
    for swa, left in ((18, [8, 12, 12]), (19, [8, 8, 12])):
        run = runtime(swa=24)
        for text in texts:
            run.insert(text)
        take(run, swa=swa)
        assert reach(run, "abcdefghX", *texts) == left


def the_deeper_is_not_the_colder() -> None:
    """Of a window that lies in several nodes, the last one is the last to go."""
    run = runtime(swa=8, window=4)
    run.insert("abcdef")
    run.insert("abcdefgh")
    take(run, swa=2)
    take(run, swa=1)
    (root,) = run.core.world.roots.values()
    path, _ = walk(root, spell("abcdefgh"), 0, 4 * run.page)
    assert [node.state[1] for node in path] == [ABSENT, ABSENT, PRESENT]


def states_of_ends() -> None:
    """A state that somebody went on from goes before an older one at the end of a conversation."""
    run = runtime(swa=64, states=6, components="full,mamba")
    run.insert(OTHER, checkpoint=8, states=2)
    run.insert("abcd", checkpoint=4, states=2)
    run.insert("abcdefgh", checkpoint=8, states=2)
    take(run, states=4)
    assert reach(run, OTHER, "abcdefgh", "abcdX") == [8, 8, 0]


LAWS = (short_windows, an_end_that_somebody_went_on_from, a_fork,
        the_deeper_is_not_the_colder, states_of_ends)  # fmt: skip


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_what_no_likely_end_needs_goes_first(law: Callable[[], None]) -> None:
    law()


def new_cells_count_as_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recency, "idle", Recency.touch)


def ends_are_not_told_when_a_request_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Matches, "leave", lambda matches, node, begin: None)


def what_is_gone_on_from_stays_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(World, "set_idle", lambda world, node, c: True)


def forks_are_no_ends(patch: pytest.MonkeyPatch) -> None:
    set_idle = World.set_idle

    def everywhere(matches: Matches, node: Node, begin: int) -> None:
        above: Node | None = matches._touch_end(node, node.end)
        while above is not None and above.parent is not None:
            for c in range(1, len(node.stamp)):
                set_idle(matches._world, above, c)
            above = above.parent

    patch.setattr(Matches, "leave", everywhere)


def the_end_is_stamped_first(patch: pytest.MonkeyPatch) -> None:
    touch_end = Matches._touch_end

    def end_first(matches: Matches, node: Node, end: int) -> Node:
        above = touch_end(matches, node, end)
        while node is not above:
            matches._world.recency.touch(node, 1)
            node = node.parent  # type: ignore[assignment]
        return above

    patch.setattr(Matches, "_touch_end", end_first)


RULES = (new_cells_count_as_used, ends_are_not_told_when_a_request_is_over, what_is_gone_on_from_stays_an_end,
         forks_are_no_ends, the_end_is_stamped_first)  # fmt: skip


@pytest.mark.source
@pytest.mark.parametrize("broken", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_left_out_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    failed = []
    for law in LAWS:
        try:
            law()
        except AssertionError:
            failed.append(law.__name__)
    assert failed
