"""A router's picture of one cache: the blocks on each tier, as the events tell it."""

from __future__ import annotations

from asynccache import checks
from asynccache.core.plan import Medium
from asynccache.events.wire import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch


class Mirror:
    """The blocks of one cache. ``blocks[medium]`` is the set of block hashes on ``GPU``, ``CPU`` or ``STORAGE`` after
    the events that were applied so far. Events are checked before they change anything."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {medium.value: set() for medium in Medium}

    def __repr__(self) -> str:
        return f"Mirror({', '.join(f'{medium} {len(held)}' for medium, held in self.blocks.items())})"

    def apply(self, batch: EventBatch) -> None:
        """Apply the events of one batch.

        Raises:
            ConfigError: ``batch`` is no ``EventBatch``, or one of its events is unusable. Then none of its events was
                applied.
        """
        events = checks.instance("batch: events", checks.instance("batch", batch, EventBatch).events, (list, tuple))
        for event in events:
            _check("batch: events", event)
        for event in events:
            self._note(event)

    def note(self, event: BlockEvent) -> None:
        """Apply one event.

        Raises:
            ConfigError: ``event`` is no block event, or its block hashes or its medium are unusable.
        """
        _check("event", event)
        self._note(event)

    def _note(self, event: BlockEvent) -> None:
        match event:
            case BlockStored():
                self.blocks.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
            case BlockRemoved():
                self.blocks.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
            case AllBlocksCleared():
                for held in self.blocks.values():
                    held.clear()

    def prefix(self, hashes: list[int], medium: str = "GPU") -> int:
        """Return how many of ``hashes``, the blocks of a prompt from its start, are on ``medium`` without a gap.

        Raises:
            ConfigError: ``hashes`` is no list of integers, or there is no such medium.
        """
        hashes = checks.integers("hashes", hashes)
        checks.choice("medium", medium, self.blocks)
        held = self.blocks[medium]
        return next((i for i, block in enumerate(hashes) if block not in held), len(hashes))


def _check(name: str, event: BlockEvent) -> None:
    checks.instance(name, event, (BlockStored, BlockRemoved, AllBlocksCleared))
    if not isinstance(event, AllBlocksCleared):
        checks.integers(f"{name}: block_hashes", event.block_hashes)
        if event.medium is not None:
            checks.text(f"{name}: medium", event.medium)
