"""Where a match may end at the latest: at a whole window and no page earlier or later, and never at the last token of
the prompt."""

from __future__ import annotations

import pytest

from asynccache.core.components import build
from asynccache.core.tree import ABSENT, PRESENT, Node
from tests.simulated.synchronous import SWA, SynchronousRuntime, core_config, spell

TEXT = "abcdefgh"


def path_with(windows: str, *, on_host: bool = False) -> list[Node]:
    """A path with a node for each page of TEXT, whose SWA is there (1) or not (0)."""
    run = SynchronousRuntime(core_config("full,swa", device=32, host=32, window=12))
    for pages in range(1, len(TEXT) + 1):
        run.insert(TEXT[:pages])
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
def test_a_match_ends_where_the_window_before_it_is_whole_to_the_page(windows: str, end: int, on_host: bool) -> None:
    """The window is three pages; a page of it that is missing is one page too many."""
    component = build(core_config("full,swa", window=12))[1]
    assert component.longest_end(path_with(windows, on_host=on_host), len(TEXT), on_host) == end


@pytest.mark.parametrize("components", ["full", "full,swa", "full,mamba", "full,swa,mamba"])
def test_a_request_is_not_granted_its_whole_prompt_as_a_hit(components: str) -> None:
    """It leaves the last token to be computed, so of a prompt of whole pages it has all but the last page."""
    run = SynchronousRuntime(core_config(components, device=32, host=32, window=8))
    for pages in (7, 8):
        run.insert(TEXT[:pages], checkpoint=pages if "mamba" in components else 0)
    for text, cached in ((TEXT, 7), (TEXT + "!", 8)):
        request = run.lease(spell(text))
        assert request is not None
        assert request.lease.cached == cached * run.page
        request.release()
    run.settle()
    run.audit(idle=True)
