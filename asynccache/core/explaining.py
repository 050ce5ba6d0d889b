"""Why a prompt is a hit or a miss, page by page. An explanation only reads the tree: it marks no use, so it changes no
eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.eviction import Judged, is_idle, last_touch
from asynccache.core.ghosts import Gone
from asynccache.core.matching import Matching
from asynccache.core.settings import ComponentKind
from asynccache.core.states import ABSENT, HERE, NAMES, PRESENT
from asynccache.core.tree import Node, Root, walk
from asynccache.core.world import World


class Cell(NamedTuple):
    """One component of a run: its state on the device and on the host, and its ``pins`` there, in that order."""

    component: ComponentKind
    device: str
    host: str
    pins: tuple[int, int]


class PromptRun(NamedTuple):
    """Tokens ``start`` to ``stop`` of the prompt, which one node of the tree holds. ``stored``: True if FULL is known
    to be in storage. ``whole``: True if the prompt covers the node to its end, where a state would be. ``judged``: what
    the eviction policy thinks of its FULL pages; None if it has no opinion."""

    start: int
    stop: int
    cells: tuple[Cell, ...]
    stored: bool
    whole: bool
    judged: Judged | None


class PagesToLoad(NamedTuple):
    """The pages (states for MAMBA) of one component that are missing on the device and would come with a load_back."""

    component: ComponentKind
    pages: int


class Explanation(NamedTuple):
    """The places of a prompt's pages, and what ends its match. Lengths are in tokens.

    ``length``: the prompt's whole pages. ``device``, ``host``: how far a match is valid with the data of the device,
    and of device and host together. ``full``: how far FULL alone goes. ``tree``: how far the tree knows the prompt.
    ``loads``: the pages that would be loaded back from the host for the match. ``ends``: the component that ends the
    match, None if the match is not cut short. ``why``: the reason in words. ``gone``: what became of the page where the
    tree ends, as far as it is remembered.
    """

    length: int
    device: int
    host: int
    full: int
    tree: int
    runs: tuple[PromptRun, ...]
    loads: tuple[PagesToLoad, ...]
    ends: ComponentKind | None
    why: str
    gone: Gone


class Explaining:
    """Explains prompts in one world."""

    def __init__(self, world: World, matching: Matching) -> None:
        self._world = world
        self._matching = matching
        self._size = world.config.page_size

    def explain(self, space: bytes, key: bytes) -> Explanation:
        """See ``CacheCore.explain``."""
        world, size, page = self._world, self._size, self._world.page_bytes
        root = world.roots.get(space)
        path, reached = walk(root, key, 0, page) if root is not None else ([], 0)
        pages, tree = len(key) // page, reached // page
        found = self._matching.ends(path, reached)
        full = found.full
        end, limit = self._limit(path, full)
        gone = self.gone(path[-1] if path else root or Root(space, world.count), key, tree)
        ends, why = self._why(path, pages, full, end, limit, gone)
        return Explanation(
            pages * size, found.device * size, end * size, full * size, tree * size,
            tuple(self._runs(path, tree)), self._loads(path, end), ends, why, gone,
        )  # fmt: skip

    def gone(self, node: Node, key: bytes, page: int) -> Gone:
        """Return what became of page ``page`` of ``key``, where the tree ends in ``node``."""
        ghosts, at = self._world.ghosts, page * self._world.page_bytes
        following = key[at : at + self._world.page_bytes]
        if ghosts is None or node.end != page or len(following) < self._world.page_bytes:
            return Gone.NEVER
        return ghosts.find(node, following)

    def limit(self, path: Sequence[Node], full: int) -> ComponentKind | None:
        """Return the auxiliary component that ends a match along ``path`` before page ``full``, up to which FULL goes;
        None if none does."""
        limit = self._limit(path, full)[1]
        return None if limit is None else self._world.components[limit].kind

    def _limit(self, path: Sequence[Node], full: int) -> tuple[int, int | None]:
        """Return where the match ends, in pages, and the auxiliary component that shortened it last; None if none
        did."""
        end, limit, moved = full, None, True
        while end and moved:
            moved = False
            for component in self._world.auxiliary:
                before, end = end, component.longest_end(path, end, True)
                if end < before:
                    limit, moved = component.index, True
        return end, limit

    def _why(
        self, path: Sequence[Node], pages: int, full: int, end: int, limit: int | None, gone: Gone
    ) -> tuple[ComponentKind | None, str]:
        if end == pages:
            return None, "the whole prompt is there"
        if limit is None:
            return ComponentKind.FULL, self._why_full(path, full, gone)
        kind, size = self._world.components[limit].kind, self._size
        if kind is ComponentKind.MAMBA:
            return kind, f"no state is kept at any position from {(end + 1) * size} to {full * size}"
        hole = next(node for node in reversed(path) if node.end > end and self._lacks(node, limit))
        return kind, f"a window that ends beyond {end * size} needs what is gone of {self._span(hole, full)}"

    def _span(self, node: Node, full: int) -> str:
        start = node.parent.end if node.parent is not None else 0
        return f"{start * self._size} to {min(node.end, full) * self._size}"

    def _lacks(self, node: Node, c: int) -> bool:
        state = node.state
        return state[c] not in HERE and not (state[c] == ABSENT and state[c + self._world.count] == PRESENT)

    def _why_full(self, path: Sequence[Node], full: int, gone: Gone) -> str:
        if path and path[-1].end > full and self._lacks(path[-1], 0):
            return "what follows is in neither tier now, though the tree knows it: it is on its way in or out"
        return _WORDS[gone]

    def _runs(self, path: Sequence[Node], tree: int) -> list[PromptRun]:
        runs, start, size, count = [], 0, self._size, self._world.count
        for node in path:
            stop = min(node.end, tree)
            cells = tuple(
                Cell(component.kind, NAMES[node.state[c]].lower(), NAMES[node.state[c + count]].lower(),
                     (node.pins[c], node.pins[c + count]))
                for c, component in enumerate(self._world.components)
            )  # fmt: skip
            stored = bool(self._world.stored(node) & 1)
            runs.append(PromptRun(start * size, stop * size, cells, stored, stop == node.end, self._judged(node)))
            start = stop
        return runs

    def _judged(self, node: Node) -> Judged | None:
        world = self._world
        since = max(node.used, last_touch(node, 0))  # the stamp of a node that has children is not kept up
        judged = world.policy.judge(node, max(0, world.recency.time - since))
        return Judged(judged.kind, judged.age, 0.0) if judged is not None and is_idle(node, 0) else judged

    def _loads(self, path: Sequence[Node], end: int) -> tuple[PagesToLoad, ...]:
        lacking = zip(self._world.components, self._matching.missing(path, end), strict=True)
        return tuple(PagesToLoad(component.kind, pages) for component, pages in lacking if pages)


_WORDS = {
    Gone.NEVER: "what follows was never here, or so long ago that it is forgotten",
    Gone.DEVICE: "what follows was evicted from the device, and there was no copy of it",
    Gone.HOST: "what follows was evicted from the host, and was not in storage",
    Gone.STORED: "what follows was evicted, and was in storage then",
}
