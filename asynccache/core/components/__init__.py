"""Components, each of which decides some things for itself. The tree, the stages and the stores never ask which kind it
is.

A component is FULL, SWA or MAMBA. All of them answer the same questions: may a match end here, from which page on does
such an end need the component's data, and is that data divided when a node splits. Positions are pages from the root.
"""

from __future__ import annotations

from asynccache.core.components.component import Component
from asynccache.core.components.full import FullComponent
from asynccache.core.components.mamba import MambaComponent
from asynccache.core.components.swa import SlidingWindowComponent
from asynccache.core.settings import ComponentKind, CoreConfig


def build(config: CoreConfig) -> tuple[Component, ...]:
    """Return the configured components, in order."""
    return tuple(_component(index, config) for index in range(len(config.components)))


def _component(index: int, config: CoreConfig) -> Component:
    spec, hosts = config.components[index], len(config.components)
    match spec.kind:
        case ComponentKind.FULL:
            return FullComponent(index, hosts)
        case ComponentKind.SWA:
            return SlidingWindowComponent(index, hosts, -(-spec.window // config.page_size))
        case ComponentKind.MAMBA:
            return MambaComponent(index, hosts)
