"""Which pools hold a component's pages. Plain arithmetic over the pools' specifications, for the head and for workers.

A component's slots index its own pool and every sidecar derived from it; a logical pool has no bytes and is left out.
FULL *is* its own pool or, where that is logical, all pools that derive from it (``lead``); what else derives from it
(``follow``) is stored before it and read after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from asynccache.config import PoolSpec
from asynccache.core.settings import ComponentKind

FULL = int(ComponentKind.FULL)


class PoolLayout:
    """The pools, by component index.

    ``of``: the pools with bytes of each component. ``components``: the indices of the model's components, FULL's first.
    ``sidecars``: True if the model has pools that derive from FULL.
    """

    def __init__(self, specs: Sequence[PoolSpec]) -> None:
        solid = [spec for spec in specs if spec.bytes_per_page]
        self.components = tuple(sorted({int(spec.component) for spec in specs}))
        self.of = {c: tuple(spec for spec in solid if spec.component == c) for c in self.components}
        own = tuple(spec for spec in self.of[FULL] if spec.indices_from is None)
        self.lead = own or self.of[FULL]
        self.follow = tuple(spec for spec in self.of[FULL] if spec not in self.lead)
        self.sidecars = any(spec.component == FULL and spec.indices_from is not None for spec in specs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(name for name, _ in self.named())})"

    def named(self) -> list[tuple[str, int]]:
        """Return the name and the component's index of every pool that has stored objects."""
        return [(spec.name, c) for c, pools in self.of.items() for spec in pools]

    def counts(self, pool: str) -> bool:
        """Return True if stored pages of ``pool`` are counted as pages of FULL. Of the pools that make up FULL it is
        the last to be stored."""
        return bool(self.lead) and pool == self.lead[-1].name
