"""The match of a prompt: how far it is cached, on which tier, which cells become recent by that, and, page by page, why
it is a hit or a miss (``Explanations``). An explanation only reads the tree: it marks no use, so it changes no
eviction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asynccache.core.eviction import Judged, is_idle, last_touch
from asynccache.core.ledger import NOWHERE
from asynccache.core.settings import ComponentKind
from asynccache.core.tree import ABSENT, HERE, LEAVING, NAMES, PRESENT, Gone, Node, Root, walk
from asynccache.core.world import World


class Match(NamedTuple):
    """The lengths to which a prompt is cached, in tokens."""

    device: int = 0
    """The longest prefix that is valid on the device."""
    host: int = 0
    """The longest prefix that is valid with the data of device and host together."""
    full: int = 0
    """How far FULL alone goes."""
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    """To reach ``host``, a load_back would bring ``host_hit_length`` tokens of FULL and this many of SWA."""
    mamba_host_hit_length: int = 0
    """How many MAMBA states a load_back would bring."""

    @property
    def needs_load_back(self) -> bool:
        """True if ``host`` is reached only with a load_back of FULL, SWA or MAMBA."""
        return bool(self.host_hit_length or self.swa_host_hit_length or self.mamba_host_hit_length)


class Ends:
    """The ends of a match, in pages. Never changed."""

    __slots__ = ("device", "full", "union")

    def __init__(self, device: int, union: int, full: int) -> None:
        self.device = device
        """The end with the data of the device."""
        self.union = union
        """The end with the data of device and host together."""
        self.full = full
        """How far FULL alone goes."""


class Matches:
    """Finds matches in one world. A match changes only how recent cells are, and so the eviction orders."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._page_size = world.config.page_size
        self._count = world.count
        self._swa = world.swa
        self._mamba = world.mamba

    def match(self, space: bytes, key: bytes) -> Match:
        path, reached = self._world.find(space, key)
        if not path:
            return Match()
        ends = self.ends(path, reached)
        self.touch(path[-1], ends.union)
        size = self._page_size
        if ends.union == ends.device:
            return Match(ends.device * size, ends.union * size, ends.full * size)
        loads = self.missing(path, ends.union)
        swa, mamba = self._swa, self._mamba
        return Match(
            ends.device * size, ends.union * size, ends.full * size, loads[0] * size,
            loads[swa] * size if swa else 0, loads[mamba] if mamba else 0,
        )  # fmt: skip

    def ends(self, path: Sequence[Node], reached: int) -> Ends:
        """Return where the match ends for a key that was followed along ``path`` up to byte ``reached``."""
        world = self._world
        page = reached // world.page_bytes
        full = world.components[0].longest_end(path, page, False)
        device = world.agreed_end(path, full, False)
        if device == page or not world.has_host:
            return Ends(device, device, full)
        full = world.components[0].longest_end(path, page, True)
        union = world.agreed_end(path, full, True)
        return Ends(min(device, union), union, full)

    def missing(self, path: Sequence[Node], end: int) -> list[int]:
        """Return by component how many pages (states for MAMBA) the device lacks for a match that ends at page
        ``end``."""
        lacking = [0] * self._count
        for component in self._world.components:
            c, first = component.index, component.first_page(end)
            for node in reversed(path):
                start = node.parent.end  # type: ignore[union-attr]
                if node.end <= first:
                    break
                if start < end and node.state[c] in (ABSENT, LEAVING):
                    lacking[c] += min(node.end, end) - max(start, first)
        return lacking

    def touch(self, node: Node, end: int) -> None:
        """Mark the cells that a match ending at page ``end`` needs as used just now: FULL and MAMBA of the node that
        ``end`` lies in, and SWA of the nodes of the last window, the first of them first. ``node``: that node, or one
        below it."""
        recency = self._world.recency
        while node.parent is not None and node.parent.end >= end:
            node = node.parent
        if node.parent is None:
            return
        recency.touch(node, 0)
        if self._count > 1:
            self._touch_end(node, end)

    def _touch_end(self, node: Node, end: int) -> Node:
        """Mark the cells of SWA and MAMBA that a match ending at page ``end``, in ``node``, needs as used just now.
        Return the node above all marked ones."""
        recency, swa = self._world.recency, self._swa
        self._world.reprieve(node)
        if self._mamba:
            recency.touch(node, self._mamba)
        window, above = [node], node.parent
        assert above is not None
        if swa:
            first = self._world.components[swa].first_page(end)
            while above.parent is not None and above.end > first:
                window.append(above)
                above = above.parent
            for part in reversed(window):
                self._world.reprieve(part)
                recency.touch(part, swa)
        return above

    def use(self, end: Node, forked: int) -> None:
        """Tell the eviction policy, if it learns, that a request is over. The request used the path from the root to
        ``end``, and still holds it. Cells of that path that wait in a queue of the policy are put in order anew, since
        their place depends on their uses. ``forked``: the page at which the request's text left the texts of earlier
        requests; 0: it left none."""
        world = self._world
        if not world.policy.learns:
            return
        world.policy.use(end, forked, world.recency.tick())
        base, components = world.last_base, range(1 if world.policy.full_only else self._count)
        node, parent = end, end.parent
        while parent is not None:
            for c in components:
                if node.entry[base + c] is not None and node.stamp[c] >= 0:
                    world.reorder(node, base + c)
            node, parent = parent, parent.parent

    def leave(self, node: Node, begin: int) -> None:
        """Mark SWA and MAMBA as used or idle on the path of a request that is over. The request's match had ended at
        page ``begin``, and its lease held the path to ``node`` last.

        The next match of its text is likely to end at ``node``, or where texts fork. Cells that a match ending at
        ``node`` needs count as used. Cells that a match ending at a fork needs stay as they are. All other cells are
        idle from now on. The walk goes up from ``node`` through what the request added, and on until it meets what was
        idle before.
        """
        if node.parent is None or self._count == 1:
            return
        low, above = NOWHERE, self._touch_end(node, node.end)
        while above.parent is not None:
            forks = len(above.children or ()) > 1
            if forks and self._swa:
                low = min(low, self._world.components[self._swa].first_page(above.end))
            known = not forks
            if self._swa and above.end <= low:
                known &= self._world.set_idle(above, self._swa)
            if self._mamba and not forks:
                known &= self._world.set_idle(above, self._mamba)
            if known and above.end <= min(low, begin):
                return
            above = above.parent


class Cell(NamedTuple):
    """One component of a run, on both tiers: its states, and its ``pins`` on device and host. (In the tree a cell is on
    one tier.)"""

    component: ComponentKind
    device: str
    host: str
    pins: tuple[int, int]


class PromptRun(NamedTuple):
    """Tokens ``start`` to ``stop`` of the prompt, which one node of the tree holds."""

    start: int
    stop: int
    cells: tuple[Cell, ...]
    stored: bool
    """True if FULL is known to be in storage."""
    whole: bool
    """True if the prompt covers the node to its end, where a state would be."""
    judged: Judged | None
    """The eviction policy's judgement of these FULL pages; None if it has none."""


class PagesToLoad(NamedTuple):
    """The pages (states for MAMBA) of one component that are missing on the device and would come with a load_back."""

    component: ComponentKind
    pages: int


class Explanation(NamedTuple):
    """The places of a prompt's pages, and what ends its match. Lengths are in tokens."""

    length: int
    """The prompt's whole pages."""
    device: int
    host: int
    """How far a match is valid with the data of device and host together; ``device``: with that of the device alone."""
    full: int
    """How far FULL alone goes."""
    tree: int
    """How far the tree knows the prompt."""
    runs: tuple[PromptRun, ...]
    loads: tuple[PagesToLoad, ...]
    """The pages that would be loaded back from the host for the match."""
    ends: ComponentKind | None
    """The component that ends the match; None if the match is not cut short."""
    why: str
    """The reason in words."""
    gone: Gone
    """What became of the page where the tree ends, as far as it is remembered."""


class Explanations:
    """Explains prompts in one world."""

    def __init__(self, world: World, matches: Matches) -> None:
        self._world = world
        self._matches = matches
        self._size = world.config.page_size

    def explain(self, space: bytes, key: bytes) -> Explanation:
        world, size, page = self._world, self._size, self._world.page_bytes
        root = world.roots.get(space)
        path, reached = walk(root, key, 0, page) if root is not None else ([], 0)
        pages, tree = len(key) // page, reached // page
        found = self._matches.ends(path, reached)
        full = found.full
        end, limit = self._limit(path, full)
        gone = self.gone(path[-1] if path else root or Root(space, world.count), key, tree)
        ends, why = self._why(path, pages, full, end, limit, gone)
        lacking = zip(world.components, self._matches.missing(path, end), strict=True)
        loads = tuple(PagesToLoad(component.kind, lacks) for component, lacks in lacking if lacks)
        return Explanation(
            pages * size, found.device * size, end * size, full * size, tree * size,
            tuple(self._runs(path, tree)), loads, ends, why, gone,
        )  # fmt: skip

    def gone(self, node: Node, key: bytes, page: int) -> Gone:
        """Return what became of page ``page`` of ``key``, where the tree ends in ``node``."""
        ghosts, at = self._world.ghosts, page * self._world.page_bytes
        following = key[at : at + self._world.page_bytes]
        if ghosts is None or node.end != page or len(following) < self._world.page_bytes:
            return Gone.NEVER
        return ghosts.find(node, following)

    def limit(self, path: Sequence[Node], full: int) -> ComponentKind | None:
        """Return the auxiliary component that ends a match before ``full``, the page up to which FULL goes; None if
        none does."""
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
            moving = path and path[-1].end > full and self._lacks(path[-1], 0)
            return ComponentKind.FULL, _MOVING if moving else _WORDS[gone]
        kind, size = self._world.components[limit].kind, self._size
        if kind is ComponentKind.MAMBA:
            return kind, f"no state is kept at any position from {(end + 1) * size} to {full * size}"
        hole = next(node for node in reversed(path) if node.end > end and self._lacks(node, limit))
        start = hole.parent.end  # type: ignore[union-attr]
        gap = f"{start * size} to {min(hole.end, full) * size}"
        return kind, f"a window that ends beyond {end * size} needs what is gone of {gap}"

    def _lacks(self, node: Node, c: int) -> bool:
        state = node.state
        return state[c] not in HERE and not (state[c] == ABSENT and state[c + self._world.count] == PRESENT)

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


_MOVING = "what follows is in neither tier now, though the tree knows it: it is on its way in or out"
_WORDS = {
    Gone.NEVER: "what follows was never in memory, or so long ago that it is forgotten",
    Gone.DEVICE: "what follows was evicted from the device, and there was no copy of it",
    Gone.HOST: "what follows was evicted from the host, and was not in storage",
    Gone.STORED: "what follows was evicted, and was in storage then",
}
