"""How far a prompt matches, and why."""

from __future__ import annotations

from typing import Any

import pytest

from asynccache.core.cache import Match
from asynccache.core.components import build
from asynccache.core.match import Explanation
from asynccache.core.plan import BackupHost, BackupStorage, LoadBack
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import ABSENT, PRESENT, Ghosts, Gone, Node, Root
from tests.core.core_kit import COMPONENTS, clear_device, granted, insert, runtime, saved, take, take_beside_full, whole
from tests.simulated.synchronous import SPACE, SWA, SynchronousRuntime, core_config, spell

# How far a prompt matches: validity per component, on either tier, after every kind of loss.


MATCHES: dict[str, tuple[str, list[tuple[str, int]], dict[str, int]]] = {
    "whole pages from the root": (
        "full", [("abcdef", 0)], {"abcdef": 6, "abcdefgh": 6, "abc": 3, "abX": 2, "X": 0, "": 0, "bcd": 0}),
    "all of what is shorter than the window": ("full,swa", [("a", 0)], {"a": 1, "aX": 1}),
    "a state": ("full,mamba", [("abcdefgh", 5)], {"abcdefgh": 5, "abcdeX": 5, "abcd": 0}),
    "a state where texts fork": ("full,mamba", [("abcdefgh", 8), ("abcdXYZ", 4)], {"abcdQ": 4}),
    "a window and a state": ("full,swa,mamba", [("abcdefgh", 6)], {"abcdefgh": 6}),
    "the last state": ("full,swa,mamba", [("abcdefgh", 6), ("abcdefgh", 8)], {"abcdefgh": 8, "abcdefgX": 6}),
}  # fmt: skip
"""Requests, each with the page after which it keeps a state, and how far others match."""


@pytest.mark.parametrize("case", MATCHES)
def test_a_match_ends_where_all_components_are_there(case: str) -> None:
    components, texts, pages = MATCHES[case]
    run = runtime(components)
    for text, checkpoint in texts:
        run.insert(text, checkpoint=checkpoint)
    assert {text: run.reach(text) for text in pages} == {text: (reach, reach) for text, reach in pages.items()}


def test_a_match_ends_at_a_page_not_at_a_token() -> None:
    run = runtime()
    run.insert("abc")
    assert run.match(spell("ab") + spell("c")[:12]).device == 8
    assert run.match(spell("ab") + spell("c")[:12] + spell("X")).device == 8


@pytest.mark.parametrize("components", ["full,swa", "full,mamba", "full,swa,mamba"])
def test_hit_lengths_say_what_a_load_would_bring(components: str) -> None:
    run = runtime(components, device=16, host=64, window=8)
    whole(run, "abcdefgh")
    clear_device(run)
    before = run.core.statistics()
    found = run.match(spell("abcdefgh"))
    assert run.core.statistics() == before
    assert (found.device, found.host, found.host_hit_length) == (0, 32, 32)
    assert found.swa_host_hit_length == (8 if "swa" in components else 0)
    assert found.mamba_host_hit_length == ("mamba" in components)


def test_mamba_alone_off_the_device_needs_a_load_back() -> None:
    run = runtime("full,mamba", states=4)
    run.insert("abcd", checkpoint=4)
    run.insert("abcdefgh")
    run.flush()
    take(run, 0, 4).release()
    found = run.match(spell("abcdefgh"))
    assert found == Match(0, 16, 32, 0, 0, 1)
    assert found.needs_load_back


# Where a match may end at the latest: at a whole window and no page earlier or later, and never at the last token of
# the prompt.


TEXT = "abcdefgh"


def path_with(windows: str, *, on_host: bool = False) -> list[Node]:
    """A path with a node for each page of TEXT, whose SWA is there (1) or not (0)."""
    run = runtime("full,swa", window=12)
    insert(run, *(TEXT[:pages] for pages in range(1, len(TEXT) + 1)))
    path, _ = run.core.world.find(next(iter(run.core.world.roots)), spell(TEXT))
    assert [node.end for node in path] == list(range(1, len(TEXT) + 1))
    for node, there in zip(path, windows, strict=True):
        for tier, place in enumerate((SWA, SWA + run.core.world.count)):
            node.state[place] = PRESENT if there == "1" and tier == on_host else ABSENT
    return path


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("windows", "end"),
    [("11111111", 8), ("00000111", 8), ("00000011", 0), ("00001110", 7), ("01110110", 4), ("11011011", 2),
     ("11000000", 2), ("00111011", 5)],
)  # fmt: skip
@pytest.mark.usefixtures("breaks_a_core")
def test_a_match_ends_where_the_window_before_it_is_whole_to_the_page(windows: str, end: int, on_host: bool) -> None:
    """The window is three pages; a page of it that is missing is one page too many."""
    component = build(core_config("full,swa", window=12))[1]
    assert component.longest_end(path_with(windows, on_host=on_host), len(TEXT), on_host) == end


@pytest.mark.parametrize("components", COMPONENTS)
def test_a_request_is_not_granted_its_whole_prompt_as_a_hit(components: str) -> None:
    """It leaves the last token to be computed, so of a prompt of whole pages it has all but the last page."""
    run = runtime(components)
    whole(run, TEXT[:7], TEXT)
    for text, cached in ((TEXT, 7), (TEXT + "!", 8)):
        request = granted(run, text)
        assert request.lease.cached == cached * run.page
        request.release()


# Why a prompt is a hit or a miss: where its pages are, what would be loaded, what ends the match, what became of the
# rest. Asking changes nothing.


FULL, _, MAMBA = ComponentKind


def remembering(components: str = "full", **options: Any) -> SynchronousRuntime:
    return runtime(components, remember=64, **options)


def explained(run: SynchronousRuntime, text: str) -> Explanation:
    return run.core.explain(SPACE, spell(text))


def test_nothing_is_known_of_what_was_never_here() -> None:
    found = explained(remembering(), "abc")
    assert (found.length, found.device, found.host, found.full, found.tree) == (12, 0, 0, 0, 0)
    assert (found.runs, found.loads, found.ends, found.gone) == ((), (), FULL, Gone.NEVER)
    assert "never in memory" in found.why


def test_a_whole_prompt_on_the_device() -> None:
    run = remembering(host=0)
    run.insert("abcd")
    found = explained(run, "abcd")
    assert (found.device, found.host, found.ends) == (16, 16, None)
    (part,) = found.runs
    assert (part.start, part.stop, part.whole, part.stored) == (0, 16, True, False)
    assert part.cells[0][:3] == (FULL, "present", "absent")


def test_runs_follow_the_nodes_and_say_what_is_on_its_way() -> None:
    run = remembering()
    saved(run, "abcd")
    run.insert("abxy")
    first, second = explained(run, "abxy").runs
    assert (first.stop, first.cells[0].host, first.stored) == (8, "present", True)
    assert (second.stop, second.cells[0].host, second.stored) == (16, "arriving", False)


def test_what_only_the_host_has_would_be_loaded() -> None:
    run = remembering(device=8)
    saved(run, "abcd")
    take(run, 8).release()
    found = explained(run, "abcd")
    assert (found.device, found.host, found.ends) == (0, 16, None)
    assert [(load.component, load.pages) for load in found.loads] == [(FULL, 4)]
    granted(run, "abcdz")
    assert run.in_flight(LoadBack)
    assert explained(run, "abcd").loads == ()


@pytest.mark.parametrize(
    ("host", "storage", "gone"), [(0, False, Gone.DEVICE), (4, False, Gone.HOST), (4, True, Gone.STORED)]
)
def test_from_where_it_was_evicted_is_remembered(host: int, storage: bool, gone: Gone) -> None:
    run = remembering(device=4, host=host, storage=storage)
    saved(run, "abcd")
    take(run, 4).release()
    run.insert("wxyz")
    saved(run, "stuv")
    found = explained(run, "abcd")
    assert (found.tree, found.gone) == (0, gone)
    assert explained(run, "qqqq").gone is Gone.NEVER


def test_the_middle_of_a_path_remembers_what_hung_below_it() -> None:
    run = remembering(device=8, host=0)
    insert(run, "abcd", "abcdefgh")
    take(run, 1).release()
    found = explained(run, "abcdefgh")
    assert (found.tree, found.gone) == (16, Gone.DEVICE)
    assert explained(run, "abcdxx").gone is Gone.NEVER
    assert explained(run, "abxx").gone is Gone.NEVER


def test_no_state_ends_a_match() -> None:
    run = remembering("full,mamba", host=0)
    run.insert("abcdef", checkpoint=2)
    found = explained(run, "abcdef")
    assert (found.device, found.full, found.ends) == (8, 24, MAMBA)
    assert "from 12 to 24" in found.why


def test_a_hole_in_the_window_ends_a_match() -> None:
    run = remembering("full,swa", device=16, host=0, window=8)
    insert(run, "abcd", "abcdefgh")
    take_beside_full(run, swa=14)
    found = explained(run, "abcd")
    assert (found.full, found.host, found.ends) == (16, 0, ComponentKind.SWA)
    assert "a window that ends beyond 0 needs what is gone of 8 to 16" in found.why


def test_asking_touches_nothing() -> None:
    run = remembering(device=8, host=0)
    insert(run, "abcd", "efgh")
    for _ in range(3):
        explained(run, "abcd")
    take(run, 4).release()
    assert run.reach("abcd")[0] == 0
    assert run.reach("efgh")[0] == 4


def test_what_is_stored_is_known_once_it_is() -> None:
    run = remembering()
    run.insert("abcd")
    run.complete(*run.in_flight(BackupHost))
    assert not explained(run, "abcd").runs[0].stored
    run.complete(*run.in_flight(BackupStorage))
    assert explained(run, "abcd").runs[0].stored


def test_only_so_many_are_remembered() -> None:
    ghosts, root = Ghosts(8), Root(SPACE, 1)
    for i in range(100):
        ghosts.note(root, bytes([i]) * 4, Gone.HOST)
    known = [i for i in range(100) if ghosts.find(root, bytes([i]) * 4)]
    assert known == list(range(known[0], 100))
    assert 4 <= len(known) <= 8


def test_a_namespace_that_comes_again_is_remembered() -> None:
    """Its root is another one."""
    run = remembering(device=4, host=0)
    run.insert("abcd")
    run.lease(b"", new=4 * run.page, space=bytes(32))
    assert SPACE not in run.core.world.roots
    assert explained(run, "abcd").gone is Gone.DEVICE
