"""A component that the core does not have, as an example for docs/components.md: attention in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from asynccache import compiled
from asynccache.core.components import Component
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import ABSENT, HERE, PRESENT

if compiled.CORE != "pure":
    pytest.skip("a compiled core takes no component of one's own: ASYNCCACHE_PURE=1", allow_module_level=True)


class Chunked(Component):
    """Attention within chunks of ``chunk`` pages: a token sees those before it in its own chunk."""

    def __init__(self, index: int, hosts: int, chunk: int) -> None:
        super().__init__(ComponentKind.SWA, index, hosts, divides=True)    # SWA: what explanations call it
        self.chunk = chunk

    def first_page(self, end: int) -> int:
        return end // self.chunk * self.chunk

    def longest_end(self, path: Sequence[Any], end: int, host: bool) -> int:
        first = self.first_page(end)
        for node in reversed(path):
            start, state = node.parent.end, node.state
            there = state[self.index] in HERE
            there = there or (host and state[self.index] == ABSENT and state[self.host] == PRESENT)
            if not there and start < end and node.end > first:
                end = max(start, first)          # before this hole, or where its chunk begins
        return end


def path(*nodes: tuple[int, bool]) -> list[SimpleNamespace]:
    """What the core would hand in: nodes from the root on, each of so many pages, with or without data."""
    made = [SimpleNamespace(parent=None, end=0, state={})]
    for pages, there in nodes:
        parent = made[-1]
        made.append(SimpleNamespace(parent=parent, end=parent.end + pages, state={1: PRESENT if there else ABSENT}))
    return made[1:]


@pytest.mark.parametrize(("end", "first"), [(3, 0), (4, 4), (6, 4)])
def test_an_end_needs_its_own_chunk(end: int, first: int) -> None:
    assert Chunked(index=1, hosts=2, chunk=4).first_page(end) == first


@pytest.mark.parametrize(("nodes", "end"), [
    ([(4, False), (2, True)], 6),                # the first chunk is not needed
    ([(5, False), (1, True)], 4),                # the second chunk lacks a page
    ([(4, True), (1, True), (1, False)], 5),
])
def test_a_match_ends_before_the_hole_or_where_its_chunk_begins(nodes: list[tuple[int, bool]], end: int) -> None:
    assert Chunked(index=1, hosts=2, chunk=4).longest_end(path(*nodes), 6, host=False) == end
