"""What a router keeps: the blocks of each tier, by the events alone."""

from __future__ import annotations

from asynccache import checks
from asynccache.core.plan import Medium
from asynccache.events.wire import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored, EventBatch


class Mirror:
    """``blocks[medium]``: hashes on GPU, CPU and STORAGE, as far as the events that were applied tell."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {medium.value: set() for medium in Medium}

    def __repr__(self) -> str:
        return f"Mirror({', '.join(f'{medium} {len(held)}' for medium, held in self.blocks.items())})"

    def apply(self, batch: EventBatch) -> None:
        """Take note of one batch."""
        for event in batch.events:
            self.note(event)

    def note(self, event: BlockEvent) -> None:
        """Take note of one event."""
        match event:
            case BlockStored():
                self.blocks.setdefault(event.medium or "GPU", set()).update(event.block_hashes)
            case BlockRemoved():
                self.blocks.setdefault(event.medium or "GPU", set()).difference_update(event.block_hashes)
            case AllBlocksCleared():
                for held in self.blocks.values():
                    held.clear()

    def prefix(self, hashes: list[int], medium: str = "GPU") -> int:
        """How many of ``hashes``, a prompt's blocks from its start, are on ``medium``."""
        checks.choice("medium", medium, self.blocks)
        held = self.blocks[medium]
        return next((i for i, block in enumerate(hashes) if block not in held), len(hashes))
