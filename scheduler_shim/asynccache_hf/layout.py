"""The pools that a model's cache needs, and which part of them each of its layers uses. Plain values, no I/O, no
model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from asynccache_shim.model import Checkpoint, Chunk, Pages
from asynccache_shim.request import Tokens
from transformers.cache_utils import DynamicCache

from asynccache import CacheConfig, ConfigError, Full, HitPolicy, Lease, Mamba, Sidecar, SlidingWindow
from asynccache_hf.memory import Track
from asynccache_hf.parts import LayerPart

COMPONENTS = ("full", "swa", "mamba")

SCHEMA = 1
"""The version of what a page's bytes mean. It is to be increased when that changes; it is part of the name by which a
cache knows the model, and so of the key of every page."""

UNEVEN = "2"
"""The version where layers of one pool keep different amounts of a token."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool."""

    name: str
    source: str
    """The component whose slots the pool uses."""
    covers: tuple[int, ...]
    """For each of the pool's layers the layer of the model that it belongs to."""
    layer_bytes: int
    """The bytes of a page, or of a state, in one of the pool's layers."""
    dtype: str

    @property
    def layers(self) -> int:
        return len(self.covers)

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_bytes

    def sidecar(self) -> Sidecar:
        """Return the pool as a sidecar. A sidecar of a window's pages is needed where the window ends, one of FULL's
        pages everywhere."""
        policy = HitPolicy.TRAILING_PAGES if self.source == "swa" else HitPolicy.ALL_PAGES
        return Sidecar(name=self.name, indices_from=self.source, bytes_per_page=self.page_bytes, layers=self.layers,
                       covers=self.covers, hit_policy=policy, dtype=self.dtype)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer of the model: its parts, and for each track of each part the layer of its pool."""

    parts: tuple[LayerPart, ...]
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A model's layers and the pools that they need, as ``describe`` found them. ``model`` names the weights;
    ``window`` is the longest of the sliding windows, or 0.
    """

    model: str
    page_size: int
    window: int
    pools: tuple[PoolPlan, ...]
    layers: tuple[LayerPlan, ...]
    kind: type = DynamicCache
    """Transformers' class of the model's cache."""
    limit: int | None = None
    """The most tokens that a request may have, prompt and output; None: no limit is known (``description.longest``)."""
    one_by_one: bool = False
    """True if a call that goes on after recurrent states must compute one token: in a longer one the model forgets
    them."""
    packed: bool = False
    """True if several requests may be computed in one call."""

    def new_cache(self, config: Any) -> Any:
        """An empty cache of transformers for a model with this ``config``."""
        return DynamicCache(config=config) if self.kind is DynamicCache else self.kind()

    def check_length(self, tokens: int) -> None:
        """Raise ``ConfigError`` if a request of so many tokens is longer than ``limit``."""
        if self.limit is not None and tokens > self.limit:
            raise ConfigError(
                f"{tokens} tokens: this model's rotary embedding turns every key by another angle once a sequence has "
                f"more than {self.limit}, so keys of a shorter one cannot be reused there; at most {self.limit} tokens "
                f"(prompt and output) can be served from the cache"
            )

    @classmethod
    def of(cls, model: str, page_size: int, window: int, parts: Sequence[tuple[LayerPart, ...]]) -> Layout:
        """Return the layout of a model whose layers have these ``parts``."""
        placed: dict[str, list[tuple[int, Track]]] = {}

        def place(index: int, track: Track) -> int:
            placed.setdefault(track.pool, []).append((index, track))
            return len(placed[track.pool]) - 1

        layers = tuple(
            LayerPlan(own, tuple(tuple(place(index, track) for track in part.tracks) for part in own))
            for index, own in enumerate(parts)
        )
        pools = []
        for pool, own in placed.items():
            tracks = [track for _, track in own]
            dtypes = "+".join(dict.fromkeys(track.dtypes for track in tracks))
            layer_bytes = max(track.page_bytes(page_size) for track in tracks)
            pools.append(PoolPlan(pool, tracks[0].source, tuple(index for index, _ in own), layer_bytes, dtypes))
        return cls(model, page_size, window, tuple(pools), layers)

    def with_draft(self, draft: Layout) -> tuple[Layout, Layout]:
        """Return two layouts for speculative decoding: that of a cache that has room for a draft model's KV too, and
        the one that the draft runs on. The draft's data of every token is a sidecar of FULL, and the data of its
        windows a sidecar of SWA.

        Raises:
            ConfigError: the draft's data cannot be kept in sidecars of this model's pools.
        """
        if draft.page_size != self.page_size:
            raise ConfigError(f"draft: page_size={draft.page_size}, and the model's is {self.page_size}")
        if draft.recurrent:
            raise ConfigError("draft: it keeps recurrent states, and those have no sidecars")
        if draft.window > self.window:
            raise ConfigError(f"draft: its window of {draft.window} is longer than the model's, {self.window}")
        own = tuple(replace(pool, name=f"draft_{pool.name}") for pool in draft.pools)
        layers = tuple(replace(layer, parts=tuple(map(_drafted, layer.parts))) for layer in draft.layers)
        name = f"{self.model}+{draft.model}" + (f"@{UNEVEN}" if draft.uneven else "")
        return replace(self, model=name, pools=self.pools + own), replace(draft, pools=own, layers=layers)

    def tables(self, lease: Lease) -> dict[str, Pages]:
        """The page tables of a lease, by component; of states the working copy."""
        swa = lease.page_table("swa") if self.window else np.empty(0, np.int32)
        return {"full": lease.pages, "swa": swa, "mamba": lease.states[:1]}

    def chunk(self, lease: Lease, tokens: Tokens, start: int, stop: int, checkpoint: Checkpoint | None) -> Chunk:
        """The order to compute the positions from ``start`` to ``stop`` of ``tokens`` in the pages of a lease, for a
        model with recurrent states: it carries nothing over from one call to the next."""
        tables = self.tables(lease)
        return Chunk(0, tokens, start, stop, tables["full"], tables["swa"], lease.states, checkpoint, False)

    def pool(self, name: str) -> PoolPlan | None:
        """The plan of a pool, if there is such a one."""
        return next((pool for pool in self.pools if pool.name == name), None)

    @property
    def uneven(self) -> bool:
        """True if layers of one pool keep different amounts of a token."""
        sizes = {pool.name: pool.layer_bytes for pool in self.pools}
        tracks = [track for layer in self.layers for part in layer.parts for track in part.tracks]
        return any(track.page_bytes(self.page_size) < sizes[track.pool] for track in tracks)

    @property
    def recurrent(self) -> bool:
        """True if a match may only end where there is a checkpoint of a state."""
        return self.pool("mamba") is not None

    def cache_config(
        self,
        *,
        device_tokens: int,
        host_tokens: int = 0,
        swa_device_tokens: int | None = None,
        swa_host_tokens: int | None = None,
        device_states: int = 16,
        host_states: int = 16,
        **more: Any,
    ) -> CacheConfig:
        """Settings of a cache for this model; ``more`` goes to ``CacheConfig``. A sliding window's pool is as large as
        FULL's unless told otherwise.

        Raises:
            ConfigError: a size is unusable.
        """
        full = self.pool("full") or PoolPlan("full", "full", (0,), 0, "uint8")  # slots without bytes: FULL is logical
        swa, mamba = self.pool("swa"), self.pool("mamba")
        components: list[Full | SlidingWindow | Mamba] = [Full(
            bytes_per_token=full.page_bytes // self.page_size, layers=full.layers, covers=full.covers, dtype=full.dtype,
            device_tokens=device_tokens, host_tokens=host_tokens,
        )]  # fmt: skip
        if swa is not None:
            components.append(SlidingWindow(
                window=self.window, bytes_per_token=swa.page_bytes // self.page_size, layers=swa.layers,
                covers=swa.covers, dtype=swa.dtype,
                device_tokens=device_tokens if swa_device_tokens is None else swa_device_tokens,
                host_tokens=host_tokens if swa_host_tokens is None else swa_host_tokens,
            ))  # fmt: skip
        if mamba is not None:
            components.append(Mamba(
                state_bytes=mamba.page_bytes, layers=mamba.layers, covers=mamba.covers, dtype=mamba.dtype,
                device_states=device_states, host_states=host_states if host_tokens else 0,
            ))  # fmt: skip
        sidecars = tuple(pool.sidecar() for pool in self.pools if pool.name not in COMPONENTS)
        return CacheConfig(
            model=f"{self.model}@{UNEVEN if self.uneven else SCHEMA}", components=tuple(components), sidecars=sidecars,
            page_size=self.page_size, **more,
        )  # fmt: skip


def _drafted(part: LayerPart) -> LayerPart:
    """Return a copy of ``part`` whose tracks are in the draft's pools."""
    other = copy.copy(part)
    other.tracks = tuple(replace(track, pool=f"draft_{track.pool}") for track in part.tracks)
    return other
