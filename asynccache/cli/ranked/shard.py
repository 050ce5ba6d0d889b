"""A rank's part of the model: its stage's layers of every pool, and its share of every page's bytes."""

from __future__ import annotations

from dataclasses import replace

from asynccache.config import CacheConfig, Component, Mamba, Sidecar
from asynccache.errors import ConfigError
from asynccache.worker import Topology

PLACE = "{rank}"


def shard_config(config: CacheConfig, topology: Topology, rank: int) -> CacheConfig:
    """``config``, the head's, as ``rank`` has it.

    Raises:
        ConfigError: layers or bytes cannot be shared out; the message says of what.
    """
    return replace(
        config, components=tuple(_component(part, topology, rank) for part in config.components),
        sidecars=tuple(_sidecar(part, topology, rank) for part in config.sidecars),
    )


def store_url(url: str) -> str:
    """Where ranks store their pages: ``{rank}`` stands for the number of each. Of a folder only one process can be the
    owner, so that of a rank is one within, unless the URL says which."""
    path, mark, options = url.partition("?")
    if PLACE in url or not path.startswith("file:"):
        return url
    return f"{path.rstrip('/')}/rank-{PLACE}{mark}{options}"


def _component(part: Component, topology: Topology, rank: int) -> Component:
    size = part.state_bytes if isinstance(part, Mamba) else part.bytes_per_token
    name = "mamba-bytes" if isinstance(part, Mamba) else "bytes-per-token"
    layers = _layers(part, topology, rank)
    mine = _share(f"--{name}={size}", size, part, topology) * len(layers)
    if isinstance(part, Mamba):
        return replace(part, state_bytes=mine, layers=len(layers), covers=layers)
    return replace(part, bytes_per_token=mine, layers=len(layers), covers=layers)


def _sidecar(part: Sidecar, topology: Topology, rank: int) -> Sidecar:
    layers = _layers(part, topology, rank)
    mine = _share(f"sidecar {part.name!r}: {part.bytes_per_page} bytes a page", part.bytes_per_page, part, topology)
    return replace(part, bytes_per_page=mine * len(layers), layers=len(layers), covers=layers)


def _layers(part: Component | Sidecar, topology: Topology, rank: int) -> tuple[int, ...]:
    """The layers of the model that a rank's stage has."""
    stages, stage, layers = topology.pp, topology.place(rank).pp, part.layers
    if not getattr(part, "bytes_per_token", 1):
        return part.covers or tuple(range(layers))       # logical: slots without bytes, the same on every stage
    if layers < stages:
        raise ConfigError(f"--pp={stages}: a stage would have no layer, there are --layers={layers}")
    covers = part.covers or tuple(range(layers))
    return covers[stage * layers // stages : (stage + 1) * layers // stages]


def _share(what: str, size: int, part: Component | Sidecar, topology: Topology) -> int:
    """Bytes of one layer on one rank."""
    over = replace(topology, **dict.fromkeys(part.replicated.over, 1))
    parts = part.layers * over.tp * over.cp
    if size % parts:
        raise ConfigError(
            f"{what} must be a multiple of {parts}: {part.layers} layers over tp {over.tp} and cp {over.cp}"
        )
    return size // parts
