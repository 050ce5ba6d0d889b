"""The parts of one cache that its leases share, and who holds something.

Mutable state: ``holders``, which has the core's leases, each with the task to which it was granted, and the prefixes
that are kept. ``holders`` keeps neither a request's ``Lease`` nor its task alive.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asynccache import checks
from asynccache.core.settings import ComponentKind
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.runtime.driver import Driver
from asynccache.runtime.namespaces import Namespaces
from asynccache.runtime.prefetching import Prefetching
from asynccache.worker.contract import Worker

if TYPE_CHECKING:
    from asynccache.runtime.engine_batches import EngineBatches
    from asynccache.runtime.lookups import Lookups
    from asynccache.runtime.publishing import Publisher
    from asynccache.runtime.supervisor import Supervisor

CHECKPOINTS = 2


class LeaseParts:
    """The parts of a cache that its leases use. ``default_states``: how many MAMBA slots a lease has if it does not
    say; 0 if the model has no recurrent states. ``has_swa``: True if the model has a sliding window."""

    def __init__(
        self, driver: Driver, worker: Worker, prefetching: Prefetching, namespaces: Namespaces, engine: EngineBatches,
        publisher: Publisher, lookups: Lookups, supervisor: Supervisor,
    ) -> None:  # fmt: skip
        self.driver = driver
        self.engine = engine
        self.publisher = publisher
        self.lookups = lookups
        self.supervisor = supervisor
        self.loop = asyncio.get_running_loop()
        self.worker = worker
        self.prefetching = prefetching
        self.namespaces = namespaces
        self.holders: dict[object, weakref.ref[asyncio.Task[Any]] | None] = {}
        kinds = {component.kind for component in driver.core.config.components}
        self.has_swa = ComponentKind.SWA in kinds
        self.default_states = 1 + CHECKPOINTS if ComponentKind.MAMBA in kinds else 0

    def __repr__(self) -> str:
        return f"LeaseParts({len(self.holders)} leases)"

    def check_states(self, states: object) -> int:
        """Return ``states`` as a count of MAMBA slots.

        Raises:
            ConfigError: ``states`` is no count, or is above 0 in a cache without recurrent states.
        """
        count = checks.integer("states", states, 0)
        if count and not self.default_states:
            raise ConfigError(f"states={count}: there are no recurrent states in this cache")
        return count

    def holds(self, task: asyncio.Task[Any] | None) -> bool:
        """Return True if ``task`` holds a lease. Looks at all holders, which is fine for a caller that is about to
        wait."""
        return any(holder is not None and holder() is task for holder in self.holders.values())

    def idle(self) -> bool:
        """Return True if nobody holds a lease and no operation is under way: then nothing could give pages back."""
        return not self.holders and not len(self.driver.ops)

    def shut(self, error: Callable[[], AsyncCacheError]) -> None:
        """Send every request in line away with an ``error()`` of its own."""
        self.driver.line.fail(error)
