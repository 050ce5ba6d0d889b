"""The settings of a cache: frozen values that are checked when they are built.

A user writes a ``CacheConfig``. The rest of asynccache reads what ``CacheConfig.core()`` and ``CacheConfig.pools()``
return, where strings have become enum members. This module imports neither torch nor anything that does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from math import prod
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta, field

from asynccache import checks
from asynccache.checks import INT32_MAX
from asynccache.core.settings import (
    POLICIES,
    ComponentKind,
    ComponentSlots,
    CoreConfig,
    HitPolicy,
    PrefetchPolicy,
    WritePolicy,
)
from asynccache.errors import ConfigError
from asynccache.settings import Amount, Count, Positive, Room, Seconds, Settings, Share, fields_of, parse_size

EVICTION_POLICIES = ("lru", "p2c")
"""The policies that come with asynccache."""
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
    "uint8": 1,
}
"""Bytes of one number of each dtype that pools with shaped tensors may have."""
ROUND = 1024
"""Room that is given in bytes is rounded down to a multiple of this many tokens: whole pages of any usual size."""
MOST_LAYERS = 1 << 16
MOST_PAGE = 1 << 16
_MOST_TWICE = 0.25
"""A ``write_back_watermark`` above this draws a remark: that share of the smaller tier holds copies made ahead, of
pages that the other tier has, too."""


def eviction_policies() -> tuple[str, ...]:
    """Return the names that ``eviction`` may have now: ``EVICTION_POLICIES``, then those that somebody has added to
    ``asynccache.core.policies.POLICIES``."""
    return tuple(dict.fromkeys((*EVICTION_POLICIES, *POLICIES)))


class Replicated(Enum):
    """The directions in which all ranks hold the same bytes of a pool: none, tensor parallel, context parallel, or
    both.

    The latent vectors of MLA, for example, are the same on all tensor parallel ranks. Where such ranks share a store,
    one of them stores the pages for all. In settings True stands for ``TP_CP``, that is for all ranks of a pipeline
    stage, and False for ``NO``.
    """

    NO = "no"
    TP = "tp"
    CP = "cp"
    TP_CP = "tp,cp"

    @property
    def over(self) -> tuple[str, ...]:
        """The directions by name: ``"tp"``, ``"cp"``, both, or none."""
        return () if self is Replicated.NO else tuple(self.value.split(","))


def sized(count: float) -> str:
    """Return a number of bytes as text with a unit."""
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"


def item_bytes(dtype: object) -> int:
    """Return the bytes of a number of ``dtype``: a dtype of torch, or its name.

    Raises:
        ConfigError: a number of this dtype has no whole bytes, or there is no such dtype.
    """
    name = dtype_name(dtype)
    if name not in ITEM_BYTES:
        raise ConfigError(f"dtype={checks.shown(dtype)} must be one of {', '.join(ITEM_BYTES)}"
                          f"{checks.nearest(name, ITEM_BYTES)}")
    return ITEM_BYTES[name]


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype of torch, such as ``"bfloat16"``; text is returned as it is."""
    return checks.text("dtype", dtype if type(dtype).__name__ != "dtype" else str(dtype).removeprefix("torch."))


def kv_bytes(layers: int, kv_heads: int, head_dim: int, dtype: object) -> int:
    """Return the bytes of the keys and values of one token in these layers together."""
    return 2 * layers * kv_heads * head_dim * item_bytes(dtype)


def room_in(name: str, size: str, item: int, whole: int, unit: str) -> int:
    """Return how many items of ``item`` bytes fit into ``size``, rounded down to a multiple of ``whole``. ``unit``:
    what the items are, for the error's text.

    Raises:
        ConfigError: ``size``, the value of the setting ``name``, is no size, or is too small for ``whole`` items.
    """
    count = parse_size(name, size) // item // whole * whole if item else 0
    if not count:
        raise ConfigError(f"{name}={size!r} is less than {whole} {unit} of {item} bytes")
    return count


def split_urls(text: str) -> tuple[str, ...]:
    """Return the URLs in ``text``, which has spaces between them. A space that no scheme follows is part of a URL."""
    return tuple(re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*:)", text.strip()))


def _urls(name: str, text: str) -> tuple[str, ...]:
    return split_urls(text)


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise ConfigError(f"{name}={checks.shown(text)} must be integers with commas between them") from None


def _shapes(name: str, text: str) -> tuple[tuple[int, ...], ...]:
    try:
        return tuple(tuple(map(int, shape.split("x"))) for shape in text.split(","))
    except ValueError:
        raise ConfigError(f"{name}={checks.shown(text)} must be shapes, such as 8192x4,64x64x128") from None


def _numbers(shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(shape) for shape in shapes)


class _Pool(Settings, frozen=True, kw_only=True):
    """The settings of every pool."""

    pool: ClassVar[str] = ""
    """The name of the component's pool, and of its table in a file."""
    kind: ClassVar[ComponentKind]

    layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS, description=(
        "Layers of the pool; its bytes are divided evenly among them."))] = 1
    covers: Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_LAYERS)], ...], Meta(
        extra={"parse": _integers}, description=(
            "Which layers of the model it holds, in order, as in `[4, 5]` for a pipeline stage; `[]`: 0, 1, 2, ..."
        ))] = ()
    replicated: Annotated[Replicated, Meta(description=(
        "The ranks that hold the same bytes; one of them stores the pages for all."))] = (
        Replicated.NO)
    dtype: Annotated[str, Meta(description=(
        "The type of the bytes; part of the storage key."))] = "uint8"

    def __post_init__(self) -> None:
        self._set("dtype", dtype_name(self.dtype))
        if checks.is_flag(self.replicated):
            self._set("replicated", Replicated.TP_CP if self.replicated else Replicated.NO)
        super().__post_init__()
        if self.covers and (len(self.covers) != self.layers or list(self.covers) != sorted(self.covers)):
            raise ConfigError(f"{self._where()}covers={self.covers!r} must name a layer of the model for each of "
                              f"layers={self.layers}, never falling")

    def _where(self) -> str:
        return f"{self.pool}: "

    def _count(self, name: str, item: int, whole: int) -> None:
        """Turn the setting ``name`` into a count if it was given in bytes."""
        if isinstance(size := getattr(self, name), str):
            self._set(name, room_in(self._where() + name, size, item, whole, name.partition("_")[2]))

    def _tensors(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors in a page of one layer; none: the pool is bytes."""
        return ()


class _Attention(_Pool, frozen=True, kw_only=True):
    """The settings of the pools of attention."""

    bytes_per_token: Annotated[Amount, Meta(description=(
        "Bytes of KV of one token, all layers together; 0: slots without bytes."))]
    device_tokens: Annotated[Room, Meta(ge=1, description=(
        "Room on the device: tokens, a multiple of `page_size`, or bytes, as `8GiB`."))]
    host_tokens: Annotated[Room, Meta(ge=0, description=(
        "Room in host memory: tokens or bytes; 0: there is no host tier."))] = 0
    kv_heads: Annotated[Amount, Meta(description=(
        "Heads of keys and values, which give the pool's tensors a shape; 0: the pool is bytes."))] = 0
    head_dim: Annotated[Amount, Meta(description="Numbers in a key or a value of one head.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads or self.head_dim:
            size = kv_bytes(self.layers, self.kv_heads, self.head_dim, self.dtype)
            if size != self.bytes_per_token or not size:
                raise ConfigError(f"{self.pool}: bytes_per_token={self.bytes_per_token}, but keys and values of "
                                  f"layers={self.layers}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, "
                                  f"dtype={self.dtype} have {size}")
        for name in ("device_tokens", "host_tokens"):
            self._count(name, self.bytes_per_token, ROUND)

    @classmethod
    def attention(
        cls, *, layers: int, kv_heads: int, head_dim: int, device: int | str, host: int | str = 0,
        dtype: object = "bfloat16", **more: Any,
    ) -> Self:  # fmt: skip
        """Return the pool of attention layers with these keys and values, which ``DevicePool.kv`` shows as tensors.

        Args:
            layers: how many layers keep their KV in this pool.
            kv_heads: heads of keys and values that this process holds; with tensor parallelism its own share.
            head_dim: the numbers in a key, and in a value, of one head.
            device: room on the device: tokens, or bytes as text with a unit (``"8GiB"``).
            host: room in host memory in the same units; 0: there is no host tier.
            dtype: of keys and values: a dtype of torch, or its name.
            more: other fields, such as ``covers`` and ``window``.

        Raises:
            ConfigError: an argument is unusable.
        """
        counts = {name: checks.integer(f"{cls.pool}: {name}", count, 1, MOST_LAYERS)
                  for name, count in (("layers", layers), ("kv_heads", kv_heads), ("head_dim", head_dim))}
        size = kv_bytes(**counts, dtype=dtype)
        fields: dict[str, Any] = {**counts, "device_tokens": device, "host_tokens": host}  # text becomes tokens
        return cls(bytes_per_token=size, dtype=dtype_name(dtype), **fields, **more)

    def _tensors(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        return ((2, page_size, self.kv_heads, self.head_dim),) if self.kv_heads else ()

    def _page(self, page_size: int) -> tuple[int, int, int]:
        """Return the bytes of a page, and the pages that device and host have room for."""
        for name in ("device_tokens", "host_tokens"):
            if (value := getattr(self, name)) % page_size:
                raise ConfigError(f"{self.pool}: {name}={value} is not a multiple of page_size={page_size}")
        return self.bytes_per_token * page_size, self.device_tokens // page_size, self.host_tokens // page_size


class Full(_Attention, frozen=True, kw_only=True, tag_field="pool", tag="full"):
    """Full attention: the KV of every token is kept. Every cache has it.

    With ``bytes_per_token=0`` the pool is *logical*: it has slots and no bytes. Without host tokens there is no host
    tier, and therefore no storage. A load_back completes layer i of the model, in all pools that hold parts of it
    (``covers``), before layer i+1. The table ``[components.full]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "full"
    kind: ClassVar[ComponentKind] = ComponentKind.FULL


class SlidingWindow(_Attention, frozen=True, kw_only=True, tag_field="pool", tag="swa"):
    """Sliding-window attention, beside full attention: a position attends to the last ``window`` tokens only.

    The table ``[components.swa]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "swa"
    kind: ClassVar[ComponentKind] = ComponentKind.SWA

    window: Annotated[Count, Meta(description="Tokens that a position attends to.")]


class Mamba(_Pool, frozen=True, kw_only=True, tag_field="pool", tag="mamba"):
    """Recurrent states, beside full attention: one state stands for a whole prefix.

    The table ``[components.mamba]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "mamba"
    kind: ClassVar[ComponentKind] = ComponentKind.MAMBA

    state_bytes: Annotated[Count, Meta(description="Bytes of one recurrent state, all layers together.")]
    device_states: Annotated[Room, Meta(ge=1, description="Room on the device: states, or bytes, as `1GiB`.")]
    host_states: Annotated[Room, Meta(ge=0, description=(
        "Room in host memory: states or bytes; 0: there is no host tier."))] = 0
    parts: Annotated[tuple[tuple[Count, ...], ...], Meta(extra={"parse": _shapes}, description=(
        "The shapes of a layer's state, as in `[[8192, 4], [64, 64, 128]]`; `[]`: the pool is bytes."))] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts and (size := self.layers * _numbers(self.parts) * item_bytes(self.dtype)) != self.state_bytes:
            raise ConfigError(f"mamba: state_bytes={self.state_bytes}, but layers={self.layers} of parts={self.parts}, "
                              f"dtype={self.dtype}, have {size}")
        for name in ("device_states", "host_states"):
            self._count(name, self.state_bytes, 1)

    @classmethod
    def recurrent(
        cls, *, layers: int, parts: Sequence[Sequence[int]], device: int | str, host: int | str = 0,
        dtype: object = "float32", **more: Any,
    ) -> Self:  # fmt: skip
        """Return the pool of recurrent layers whose state is made of tensors of these shapes, which
        ``DevicePool.states`` shows.

        Args:
            layers: how many layers keep their state in this pool.
            parts: the shapes of the tensors of one layer's state, such as the window of the convolution and the state
                of the scan.
            device: room on the device: states, or bytes as text with a unit (``"1GiB"``).
            host: room in host memory in the same units; 0: there is no host tier.
            dtype: of the tensors: a dtype of torch, or its name.
            more: other fields, such as ``covers``.

        Raises:
            ConfigError: an argument is unusable.
        """
        layers = checks.integer("mamba: layers", layers, 1, MOST_LAYERS)
        shapes: tuple[tuple[int, ...], ...] = fields_of(cls)["parts"].check("mamba: parts", parts)
        if not shapes:
            raise ConfigError("mamba: parts=[] must have the shape of a tensor")
        rooms: dict[str, Any] = {"device_states": device, "host_states": host}  # text becomes a number of states
        return cls(layers=layers, parts=shapes, state_bytes=layers * _numbers(shapes) * item_bytes(dtype),
                   dtype=dtype_name(dtype), **rooms, **more)

    def _tensors(self, page_size: int) -> tuple[tuple[int, ...], ...]:
        return self.parts

    def _page(self, page_size: int) -> tuple[int, int, int]:
        """Return the bytes of a state, and the states that device and host have room for."""
        return self.state_bytes, self.device_states, self.host_states


Component = Full | SlidingWindow | Mamba

COMPONENTS: dict[str, type[Component]] = {one.pool: one for one in (Full, SlidingWindow, Mamba)}
POOL_NAME = {one.kind: name for name, one in COMPONENTS.items()}


class Sidecar(_Pool, frozen=True, kw_only=True):
    """More bytes of the pages of another pool, at the same slots. The table ``[sidecars.NAME]`` of
    docs/configuration.md, with the pool's own name, has the fields.
    """

    name: Annotated[str, Meta(pattern=r"^[\w.-]+$", description="Letters, digits, `_`, `.` and `-`.")]
    indices_from: Annotated[str, Meta(description=(
        "The component (`full`, `swa`, `mamba`) or sidecar whose slots it uses."))]
    bytes_per_page: Annotated[Count, Meta(description="Bytes of one page, all layers together.")]
    hit_policy: Annotated[HitPolicy | None, Meta(description=(
        "Which pages a hit needs; follows from `indices_from`, and is checked against that."))] = None

    def _where(self) -> str:
        return f"sidecar {checks.shown(self.name)}: "


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool, with all that follows from the settings."""

    name: str
    component: ComponentKind
    """The component whose slots index the pool. This is the pool's own component, or for a sidecar the one to which
    ``indices_from`` leads."""
    bytes_per_page: int
    """Bytes of one page, all ``layers`` together; 0 for a logical pool, which has slots, but no memory and nothing in
    storage."""
    layers: int
    device_pages: int
    host_pages: int
    """How many slots the component has on the host; ``device_pages``: on the device."""
    hit_policy: HitPolicy
    indices_from: str | None = None
    replicated: tuple[str, ...] = ()
    """The directions (``"tp"``, ``"cp"``) in which ranks hold the same bytes."""
    dtype: str = "uint8"
    covers: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the tensors of ``dtype`` in a page of one layer; none: a page is bytes."""
    shard: str = "replicated"
    """A name for the part of every page that this rank holds; it is part of the storage key."""
    writes: bool = True
    """Whether this rank is the one that writes the pages to a store which several ranks share."""

    @property
    def model_layers(self) -> tuple[int, ...]:
        """For each of the pool's layers, the number of the model's layer that it holds."""
        return self.covers or tuple(range(self.layers))

    def on_rank(self, rank: int, ranks: int, cp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1)) -> PoolSpec:
        """Return the pool as one rank holds it, with ``shard`` and ``writes`` set.

        ``rank`` of ``ranks``: the rank's place among the tensor parallel ranks. ``cp``, ``pp``: its place and the
        number of places, among context parallel ranks and among pipeline stages. Where ranks hold equal bytes, the
        first of them writes. ``covers`` already tells the stage, so the ``shard`` of a pool that has it does not.
        """
        places = {"tp": (rank, ranks), "cp": cp}
        parts = [(name, *at) for name, at in places.items() if name not in self.replicated]
        if not self.covers:
            parts.append(("pp", *pp))
        label = " ".join(f"{name} {number}/{count}" for name, number, count in parts if count > 1)
        writes = all(places[name][0] == 0 for name in self.replicated)
        return replace(self, shard=label or self.shard, writes=writes)


class CacheConfig(Settings, frozen=True, kw_only=True):
    """All settings of an ``AsyncCache``. Each field says what it means; docs/configuration.md has them in tables.

    Times are in seconds. Sizes are in tokens unless the setting's name says otherwise.
    """

    model: Annotated[str, Meta(min_length=1, description=(
        "A name for the weights; models with different names never share pages."))]
    components: tuple[Component, ...]
    """One ``Full``, then at most one ``SlidingWindow``, then at most one ``Mamba``."""
    sidecars: tuple[Sidecar, ...] = ()
    page_size: Annotated[int, Meta(ge=1, le=MOST_PAGE, description="Tokens in a page, the unit of every tier.")] = 16
    device: Annotated[str, Meta(description=(
        "Where the pages of the first tier are: `cpu`, `cuda:N`, `cuda:N?blocks=16` (see CUDA)."))] = "cpu"
    storage: Annotated[str | tuple[str, ...] | None, Meta(extra={"parse": _urls}, description=(
        "The third tier: a URL such as `file:/var/kv?capacity=10GiB`, or several, nearest first (in the environment "
        "with spaces between them)."))] = None
    write_policy: Annotated[WritePolicy, Meta(description=(
        "When pages are copied down: at once, after their second use, or when they would be lost."))] = (
            WritePolicy.WRITE_THROUGH)
    prefetch_policy: Annotated[PrefetchPolicy, Meta(description=(
        "Whether a request waits for storage: no, until all pages have arrived, or for a time."))] = (
        PrefetchPolicy.TIMEOUT)
    eviction: Annotated[str, Meta(extra={"choices": eviction_policies}, description=(
        "What is evicted when a tier is full."))] = "p2c"
    prefetch_threshold: Annotated[Amount, Meta(description=(
        "Tokens that storage must have beyond the host to make a prefetch worth it."))] = 256
    prefetch_quota: Annotated[Share, Meta(description=(
        "Share of the host's pages for prefetches; one that has waited half a second goes beyond it."))] = 0.5
    backup_quota: Annotated[Share, Meta(description=(
        "Share of the host's pages that may wait for storage; beyond it the oldest are dropped."))] = 0.25
    prefetch_timeout_base: Annotated[Seconds, Meta(description=(
        "With `timeout`: seconds that a request waits for its prefetch."))] = 1.0
    prefetch_timeout_per_1k: Annotated[Seconds, Meta(description=(
        "With `timeout`: seconds more for each 1,024 tokens."))] = 0.25
    prefetch_timeout_max: Annotated[Positive, Meta(description=(
        "With `timeout`: seconds at most."))] = 30.0
    load_back_threshold: Annotated[Amount, Meta(description=(
        "A match of fewer tokens on the host is computed again, not loaded."))] = 0
    max_backup_ops: Annotated[Count, Meta(description=(
        "Copies from device to host at one time, at most."))] = 256
    write_back_watermark: Annotated[Share, Meta(description=(
        "How much of the device is kept free or copied ahead: a share of the smaller of device and host."))] = 0.1
    kept_fraction: Annotated[Share, Meta(description="Share of the device's pages that `keep()` may pin.")] = 0.25
    close_timeout: Annotated[Positive, Meta(description=(
        "Seconds that closing waits for unsaved pages."))] = 30.0
    freeze_gc: Annotated[bool, Meta(description=(
        "Whether Python's garbage collector skips the tree, which spares long pauses."))] = False
    storage_options: Annotated[dict[str, str], Meta(description=(
        "Options of the one store, as text; they win over those in its URL."))] = field(
            default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        stores = tuple(checks.text("storage", url) for url in self.stores)
        self._set("storage", stores if len(stores) > 1 else stores[0] if stores else None)
        kinds = [one.kind for one in self.components]
        if kinds[:1] != [ComponentKind.FULL] or kinds != sorted(set(kinds)):
            raise ConfigError("components must be one Full, then at most one SlidingWindow, then at most one Mamba")
        hosts = {one._page(self.page_size)[2] > 0 for one in self.components}
        if len(hosts) > 1:
            raise ConfigError("components: either every component has host pages or none has")
        if stores and hosts == {False}:
            raise ConfigError("storage: it needs a host tier: host_tokens is 0")
        if self.storage_options and len(stores) > 1:
            raise ConfigError("storage_options: with several stores, options belong in their URLs")
        self.pools()

    @property
    def rooms(self) -> tuple[str, ...]:
        """A sentence for each pool: what it keeps, and what its room on each tier comes to."""
        units = {one.kind: "states" if isinstance(one, Mamba) else "tokens" for one in self.components}
        told = []
        for pool in self.pools():
            each = 1 if units[pool.component] == "states" else self.page_size
            item = f"{sized(pool.bytes_per_page / each)} a {units[pool.component][:-1]}"
            tiers = (f"{name} {sized(pages * pool.bytes_per_page)} for {pages * each:,} {units[pool.component]}"
                     for name, pages in (("device", pool.device_pages), ("host", pool.host_pages)) if pages)
            layers = f"{pool.layers} layer{'s' * (pool.layers > 1)}"
            told.append(f"{pool.name}: {layers}, {item}; {', '.join(tiers)}")
        return tuple(told)

    @property
    def stores(self) -> tuple[str, ...]:
        """The URLs of the stores, nearest first."""
        urls = (self.storage,) if isinstance(self.storage, str) else self.storage or ()
        return tuple(url for url in urls if url != "none")

    def core(self) -> CoreConfig:
        """Return the settings of the core.

        Raises:
            ConfigError: a component has more slots than an int32 can number.
        """
        slots = []
        for one in self.components:
            _, device, host = one._page(self.page_size)
            for tier, count in (("device", device), ("host", host)):
                if count > INT32_MAX:
                    raise ConfigError(f"{one.pool}: {count} slots on the {tier}: at most {INT32_MAX} can be numbered")
            slots.append(ComponentSlots(one.kind, device, host, one.window if isinstance(one, SlidingWindow) else 0))
        names = {one.name for one in fields(CoreConfig)} & {*self.__struct_fields__} - {"components", "storage"}
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        return CoreConfig(components=tuple(slots), storage=bool(self.stores),
                          max_prefetch_pages=max(1, int(slots[0].host * self.prefetch_quota)), **own)

    def pools(self) -> tuple[PoolSpec, ...]:
        """Return every pool: those of the components, in their order, then the sidecars in theirs.

        Raises:
            ConfigError: two pools have the same name, the bytes of a page cannot be divided among a pool's layers, an
                ``indices_from`` names no pool or closes a cycle, or a hit policy is not the one of the component whose
                slots the sidecar uses.
        """
        names = [*(one.pool for one in self.components), *(one.name for one in self.sidecars)]
        if len(set(names)) < len(names):
            raise ConfigError(f"sidecars: pool names must be unique: {names}")
        own: dict[str, PoolSpec] = {}
        for one in self.components:
            size, device, host = one._page(self.page_size)
            policy = HitPolicy.ALL_PAGES if isinstance(one, Full) else HitPolicy.TRAILING_PAGES
            own[one.pool] = PoolSpec(name=one.pool, component=one.kind, bytes_per_page=size, device_pages=device,
                                     host_pages=host, hit_policy=policy, shapes=one._tensors(self.page_size),
                                     **_common(one, size))
        return (*own.values(), *(self._sidecar_pool(one, own) for one in self.sidecars))

    def _sidecar_pool(self, spec: Sidecar, own: dict[str, PoolSpec]) -> PoolSpec:
        """Return the pool of ``spec``, at the slots of the component to which ``indices_from`` leads."""
        sidecars = {one.name: one for one in self.sidecars}
        source, seen, where = spec.indices_from, {spec.name}, f"sidecar {spec.name!r}"
        while source not in own:
            if source in seen:
                raise ConfigError(f"{where}: indices_from={source!r} closes a cycle")
            if source not in sidecars:
                near = checks.nearest(source, [*own, *sidecars])
                raise ConfigError(f"{where}: indices_from={source!r} is no pool{near}")
            seen.add(source)
            source = sidecars[source].indices_from
        root = own[source]
        if spec.hit_policy is not None and spec.hit_policy is not root.hit_policy:
            raise ConfigError(f"{where}: hit_policy={spec.hit_policy.value!r}, but its slots are those of "
                              f"{root.name!r}, which is needed as {root.hit_policy.value!r}")
        return replace(root, name=spec.name, bytes_per_page=spec.bytes_per_page, indices_from=spec.indices_from,
                       shapes=(), **_common(spec, spec.bytes_per_page))


def _common(pool: _Pool, size: int) -> dict[str, Any]:
    """Return those fields of a ``PoolSpec`` that come from ``_Pool``, the settings of every pool. ``size``: bytes of a
    page."""
    if size % pool.layers:
        raise ConfigError(f"{pool._where()}{size} bytes a page are not a multiple of layers={pool.layers}")
    return {"layers": pool.layers, "replicated": pool.replicated.over, "dtype": pool.dtype, "covers": pool.covers}


def wasted(config: CoreConfig) -> tuple[str, ...]:
    """Return a sentence for each setting that leaves room on the host unused; none where there is no host tier.

    ``write_through_selective`` leaves out pages that only one request used. Whether they would have been hit depends on
    the load and not on the host's size, so nothing is said of them.
    """
    full = config.components[0]
    if not full.host:
        return ()
    found = []
    ahead = int(min(full.device, full.host) * config.write_back_watermark)
    if config.write_back_watermark > _MOST_TWICE:
        found.append(
            f"write_back_watermark={config.write_back_watermark}: up to {ahead} pages are on both device and host, so "
            f"that both hold {ahead} pages less than the {full.device + full.host} that they have room for; "
            f"{_MOST_TWICE} is enough unless requests wait for copies"
        )
    for component in config.components[1:]:
        window = min(-(-component.window // config.page_size) or 1, full.host)
        if component.host < window:
            found.append(
                f"{component.kind.name.lower()}: the host has room for {component.host} of its pages, a match that "
                f"ends there needs {window}: the host's {full.host} pages of full serve only requests for which the "
                f"device has the {window}"
            )
        elif component.kind is ComponentKind.MAMBA and component.host * full.device < full.host:
            needed = -(-full.host // full.device)
            found.append(
                f"mamba: the host has room for {component.host} states and for {full.host} pages of full. A prompt has "
                f"{full.device} pages at most, and its pages are of use with the state at its end only: fewer than "
                f"{needed} states cannot make use of that room, and most loads need many more (`asynccache plan`)"
            )
    return tuple(found)
