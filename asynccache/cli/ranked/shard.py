"""A rank's part of the model: its stage's layers of every pool, and its share of every page's bytes."""

from __future__ import annotations

import dataclasses

from msgspec import structs

from asynccache.config import CacheConfig, Component, Mamba, Sidecar
from asynccache.errors import ConfigError
from asynccache.worker import Topology

PLACE = "{rank}"


def shard_config(config: CacheConfig, topology: Topology, rank: int) -> CacheConfig:
    """Return the part of the head's ``config`` that ``rank`` has.

    Raises:
        ConfigError: layers or bytes of a part cannot be shared out; the message names it.
    """
    return structs.replace(
        config, components=tuple(_component(part, topology, rank) for part in config.components),
        sidecars=tuple(_sidecar(part, topology, rank) for part in config.sidecars),
    )


def store_url(url: str) -> str:
    """Return the URL under which ranks store their pages; ``{rank}`` in it stands for the number of each. Only one
    process can own a folder, so each rank gets a folder within that of ``url``, unless ``url`` itself says
    ``{rank}``."""
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
        return structs.replace(part, state_bytes=mine, layers=len(layers), covers=layers)
    return structs.replace(part, bytes_per_token=mine, layers=len(layers), covers=layers)


def _sidecar(part: Sidecar, topology: Topology, rank: int) -> Sidecar:
    layers = _layers(part, topology, rank)
    mine = _share(f"sidecar {part.name!r}: {part.bytes_per_page} bytes a page", part.bytes_per_page, part, topology)
    return structs.replace(part, bytes_per_page=mine * len(layers), layers=len(layers), covers=layers)


def _layers(part: Component | Sidecar, topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the layers of the model that a rank's stage has of ``part``."""
    stages, stage, layers = topology.pp, topology.place(rank).pp, part.layers
    if not getattr(part, "bytes_per_token", 1):
        return part.covers or tuple(range(layers))       # logical: slots without bytes, the same on every stage
    if layers < stages:
        raise ConfigError(f"--pp={stages}: a stage would have no layer, there are --layers={layers}")
    covers = part.covers or tuple(range(layers))
    return covers[stage * layers // stages : (stage + 1) * layers // stages]


def _share(what: str, size: int, part: Component | Sidecar, topology: Topology) -> int:
    """Return the bytes of one layer on one rank. ``size``: the bytes of all layers on all ranks; ``what``: names them
    in an error."""
    over = dataclasses.replace(topology, **dict.fromkeys(part.replicated.over, 1))
    parts = part.layers * over.tp * over.cp
    if size % parts:
        raise ConfigError(
            f"{what} must be a multiple of {parts}: {part.layers} layers over tp {over.tp} and cp {over.cp}"
        )
    return size // parts
