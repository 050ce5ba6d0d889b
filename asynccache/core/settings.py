"""The part of the configuration that the core needs, and the enums that name its choices. Pure values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class ComponentKind(IntEnum):
    """The kinds of KV a node can hold. Plans and works name a component by this value. Within the core a component's
    index is its place among those that are configured, which may be less."""

    FULL = 0
    SWA = 1
    MAMBA = 2


class HitPolicy(Enum):
    """The pages of a pool that a prefix needs: all up to its end, or only the last few."""

    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"


class WritePolicy(Enum):
    """The rule by which a node's pages are copied to the host: at each commit, once two leases have committed through
    the node, or not before the device is about to evict the node."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchPolicy(Enum):
    """The policy that says what a lease does with a prefetch that is not finished when the lease could be granted."""

    BEST_EFFORT = "best_effort"
    WAIT_COMPLETE = "wait_complete"
    TIMEOUT = "timeout"


class Access(Enum):
    """The access that the stores attached now allow, taken together."""

    NONE = "there is none"
    READ = "they are read"
    WRITE = "they are read, and one of them is written"


# How many steps of eviction one call takes at most to make room: 1 to 2 ms.
SLICE_STEPS = 256


@dataclass(frozen=True, slots=True)
class ComponentSlots:
    """The number of slots that one component has on device and host."""

    kind: ComponentKind
    device: int
    host: int = 0
    """Slots on the host; 0 if there is no host tier."""
    window: int = 0
    """The window in tokens, for SWA only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """The core's settings, already validated by ``asynccache.config``.

    ``components`` are ordered FULL, SWA, MAMBA; FULL is always there. A *slot* holds one page (FULL, SWA) or one state
    (MAMBA). Token counts are tokens, ``*_pages`` are pages, ``*_ops`` are operations.
    """

    page_size: int
    components: tuple[ComponentSlots, ...]
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: str = "p2c"
    storage: bool = False
    """True if a store that is written is attached from the beginning."""
    publish: bool = False
    """True if plans have KV events."""
    prefetch_threshold: int = 256
    load_back_threshold: int = 0
    max_backup_ops: int = 256
    max_prefetch_pages: int = 1 << 30
    write_back_watermark: float = 0.1
    """How much is kept free or condemned, as a share of the smaller tier, 0 to 1."""
    slice_steps: int = SLICE_STEPS
    remember: int = 0
    """How many nodes that left the tree are remembered, to tell why a request missed."""
    note_given: bool = False
    """True if device slots that are given back are noted (``SlotPool.given``)."""


POLICIES: dict[str, Callable[[CoreConfig], Any]] = {}
"""The functions that make the eviction policy of one core, by the policy's name. ``asynccache.core.policies`` fills
this."""
