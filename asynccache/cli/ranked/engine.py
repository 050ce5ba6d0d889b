"""The engine of several ranks: its work is sent to all of them, as a batch.

The payload of a batch says which pages to fill or to verify. A rank that finds wrong pages fails the batch, and reports
the pages as the reason.

``shard_config`` is a rank's part of the model: its stage's layers of every pool, and its share of every page's bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from asynccache.cli.engine import BegunBatch, PageRun, Verdict
from asynccache.config import CacheConfig, Component, Mamba, Sidecar
from asynccache.core.settings import ComponentKind
from asynccache.errors import BatchFailed, ConfigError
from asynccache.worker import Topology

if TYPE_CHECKING:
    from asynccache.runtime.cache import AsyncCache

_Part = TypeVar("_Part", Component, Sidecar)
_decoder = msgspec.msgpack.Decoder(tuple[bool, list[tuple[ComponentKind, bytes, bytes, int]]])


class RankedEngine:
    """See ``Engine``. ``pools``: by component, how many pools all ranks have together."""

    slowdown = 1.0
    """The work is done in the processes of the ranks, and is not measured."""

    def __init__(self, cache: AsyncCache, pools: Mapping[ComponentKind, int]) -> None:
        self._cache = cache
        self._pools = pools

    def close(self) -> None:
        """Do nothing: the ranks end with the cache."""

    def begin(self, pieces: Sequence[PageRun], *, verifies: bool) -> BegunBatch:
        """See ``Engine``."""
        number = self._cache.send_batch(packed(pieces, verifies=verifies))
        count = sum(len(piece.ids) * self._pools[piece.component] for piece in pieces) if verifies else 0
        return BegunBatch(number, lambda: self._verdict(number, count))

    async def _verdict(self, number: int, count: int) -> Verdict:
        try:
            await self._cache.batch_ended(number)
        except BatchFailed as error:
            found = [understood(rank, reason) for rank, reason in error.reasons.items()]
            wrong = [one for one in found if one is not None]
            if len(wrong) < len(found):
                raise
            return Verdict(count, sum(one.wrong for one in wrong), tuple(what for one in wrong for what in one.what))
        return Verdict(count, 0)


def packed(pieces: Sequence[PageRun], *, verifies: bool) -> bytes:
    """Return a batch's payload that tells the ranks to verify these pages or, if ``verifies`` is False, to fill
    them."""
    parts = [(int(one.component), one.ids.tobytes(), one.values.tobytes(), one.first) for one in pieces]
    return msgspec.msgpack.encode((verifies, parts))


def unpacked(payload: bytes) -> tuple[bool, list[PageRun]]:
    """Return the order in a payload: True to verify pages or False to fill them, and the pages."""
    verifies, parts = _decoder.decode(payload)
    return verifies, [PageRun(kind, np.frombuffer(ids, np.int32).copy(), np.frombuffer(values, np.uint64).copy(), first)
                      for kind, ids, values, first in parts]


def complaint(verdict: Verdict) -> str:
    """Return the text with which a rank reports wrong pages."""
    return msgspec.json.encode(verdict._replace(what=verdict.what[:2])).decode()


def understood(rank: int, reason: str) -> Verdict | None:
    """Return the verdict of a ``complaint`` that ``rank`` has sent; None if ``reason`` is no complaint about pages."""
    try:
        found = msgspec.json.decode(reason, type=Verdict)
    except msgspec.MsgspecError:
        return None
    return found._replace(pages=0, what=(f"rank {rank}: {'; '.join(found.what)}",))


PLACE = "{rank}"


def shard_config(config: CacheConfig, topology: Topology, rank: int) -> CacheConfig:
    """Return the part of the head's ``config`` that ``rank`` has.

    Raises:
        ConfigError: layers or bytes of a part cannot be shared out; the message names it.
    """
    return structs.replace(
        config, components=tuple(_part(part, topology, rank) for part in config.components),
        sidecars=tuple(_part(part, topology, rank) for part in config.sidecars),
    )


def store_url(url: str) -> str:
    """Return the URL under which ranks store their pages; ``{rank}`` in it stands for the number of each. Only one
    process can own a folder, so each rank gets a folder within that of ``url``, unless ``url`` itself says
    ``{rank}``."""
    path, mark, options = url.partition("?")
    if PLACE in url or not path.startswith("file:"):
        return url
    return f"{path.rstrip('/')}/rank-{PLACE}{mark}{options}"


def _part(part: _Part, topology: Topology, rank: int) -> _Part:
    """Return a rank's part of a component or sidecar: its stage's layers, and its share of the bytes of each. A logical
    pool, which has slots without bytes, is the same on every stage."""
    setting = "bytes_per_page" if isinstance(part, Sidecar) else (
        "state_bytes" if isinstance(part, Mamba) else "bytes_per_token")
    size, layers, stages, stage = getattr(part, setting), part.layers, topology.pp, topology.place(rank).pp
    covers = part.covers or tuple(range(layers))
    if size:
        if layers < stages:
            raise ConfigError(f"--pp={stages}: a stage would have no layer, there are --layers={layers}")
        covers = covers[stage * layers // stages : (stage + 1) * layers // stages]
    over = dataclasses.replace(topology, **dict.fromkeys(part.replicated.over, 1))
    parts = layers * over.tp * over.cp
    if size % parts:
        what = (f"sidecar {part.name!r}: {size} bytes a page" if isinstance(part, Sidecar) else
                f"--{'mamba-bytes' if isinstance(part, Mamba) else 'bytes-per-token'}={size}")
        raise ConfigError(f"{what} must be a multiple of {parts}: {layers} layers over tp {over.tp} and cp {over.cp}")
    return structs.replace(part, **{setting: size // parts * len(covers)}, layers=len(covers), covers=covers)
