"""Who is who among several workers: see ``Topology``."""

from __future__ import annotations

from asynccache.ranks.topology import Place, Topology

__all__ = ["Place", "Topology"]
