"""The settings of a cache: frozen values that are checked when they are built.

A user writes a ``CacheConfig``. The rest of asynccache reads what ``CacheConfig.core()`` and ``CacheConfig.pools()``
return, where strings have become enum members. This module imports neither torch nor anything that does I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar, TypeVar

from asynccache import checks
from asynccache.checks import INT32_MAX, setting
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

_T = TypeVar("_T")

EVICTION_POLICIES = ("lru", "p2c")
"""The policies that come with asynccache."""
MOST_LAYERS = 1 << 16
MOST_PAGE = 1 << 16


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolFields:
    """The fields of every pool. ``pool``: the name of a component's pool and of its table in a file."""

    pool: ClassVar[str] = ""

    layers: int = field(default=1, metadata=setting(
        "How many layers the pool has; its bytes are divided evenly among them.", 1, MOST_LAYERS))
    covers: tuple[int, ...] = field(default=(), metadata=setting(
        "For each of the layers the number of the model's layer that it holds, never falling; `[]`: 0, 1, 2, ..."))
    replicated: Replicated = field(default=Replicated.NO, metadata=setting(
        "The ranks that hold the same bytes of every page, so that one of them stores the pages for all."))
    dtype: str = field(default="uint8", metadata=setting(
        "The type of the bytes; part of the storage key, so that pages of another dtype are never read."))

    def __post_init__(self) -> None:
        _check_pool(self, self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention(_PoolFields):
    """The fields of the pools of attention."""

    bytes_per_token: int = field(metadata=setting(
        "Bytes of KV of one token, all layers together; 0: a pool with slots and without bytes.", 0))
    device_tokens: int = field(metadata=setting("Room on the device, in tokens; a multiple of `page_size`.", 1))
    host_tokens: int = field(default=0, metadata=setting(
        "Room in host memory, in tokens; a multiple of `page_size`; 0: there is no host tier.", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(_Attention):
    """Full attention: the KV of every token is kept. Every cache has it.

    With ``bytes_per_token=0`` the pool is *logical*: it has slots and no bytes. Without host tokens there is no host
    tier, and therefore no storage. A load_back completes layer i of the model, in all pools that hold parts of it
    (``covers``), before layer i+1. The table ``[components.full]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(_Attention):
    """Sliding-window attention, beside full attention: a position attends to the last ``window`` tokens only.

    The table ``[components.swa]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "swa"

    window: int = field(metadata=setting("Tokens that a position attends to.", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(_PoolFields):
    """Recurrent states, beside full attention: one state stands for a whole prefix.

    The table ``[components.mamba]`` of docs/configuration.md has the fields.
    """

    pool: ClassVar[str] = "mamba"

    state_bytes: int = field(metadata=setting("Bytes of one recurrent state, all layers together.", 1))
    device_states: int = field(metadata=setting("Room on the device, in states.", 1))
    host_states: int = field(default=0, metadata=setting(
        "Room in host memory, in states; 0: there is no host tier.", 0))


Component = Full | SlidingWindow | Mamba

POOL_NAME = {ComponentKind.FULL: Full.pool, ComponentKind.SWA: SlidingWindow.pool, ComponentKind.MAMBA: Mamba.pool}
_KIND = {name: kind for kind, name in POOL_NAME.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar(_PoolFields):
    """A pool without slots of its own. It holds more bytes of the pages of another pool, at the same slots. In a file
    each one is a table of its own, whose name is the pool's name.

    The table ``[sidecars.NAME]`` of docs/configuration.md has the fields.
    """

    name: str
    indices_from: str = field(metadata=setting(
        "The component (`full`, `swa`, `mamba`) or sidecar whose slots this pool uses."))
    bytes_per_page: int = field(metadata=setting("Bytes of one page, all layers together.", 1))
    hit_policy: HitPolicy | None = field(default=None, metadata=setting(
        "Which pages a hit needs. It follows from `indices_from`; if given, it is checked against that."))

    def __post_init__(self) -> None:
        where = f"sidecar {checks.shown(self.name)}"
        _check_pool(self, where)
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ConfigError(f"{where}: name: a pool's name is made of letters, digits, '_', '.' and '-'")
        if self.hit_policy is not None:
            object.__setattr__(self, "hit_policy", checks.member(f"{where}: hit_policy", self.hit_policy, HitPolicy))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool, with all that follows from the settings.

    ``bytes_per_page``: bytes of one page, all ``layers`` together; 0 for a logical pool, which has slots, but no memory
    and nothing in storage. ``component``: the component whose slots index the pool. This is the pool's own component,
    or for a sidecar the one to which ``indices_from`` leads. ``device_pages`` and ``host_pages``: how many slots that
    component has on each tier. ``replicated``: the directions (``"tp"``, ``"cp"``) in which ranks hold the same bytes.
    ``shard``: a name for the part of every page that this rank holds; it is part of the storage key. ``writes``:
    whether this rank is the one that writes the pages to a store which several ranks share.
    """

    name: str
    component: ComponentKind
    bytes_per_page: int
    layers: int
    device_pages: int
    host_pages: int
    hit_policy: HitPolicy
    indices_from: str | None = None
    replicated: tuple[str, ...] = ()
    dtype: str = "uint8"
    covers: tuple[int, ...] = ()
    shard: str = "replicated"
    writes: bool = True

    @property
    def model_layers(self) -> tuple[int, ...]:
        """For each of the pool's layers, the number of the model's layer that it holds."""
        return self.covers or tuple(range(self.layers))

    def on_rank(self, rank: int, ranks: int, cp: tuple[int, int] = (0, 1), pp: tuple[int, int] = (0, 1)) -> PoolSpec:
        """Return the pool as one rank holds it, with ``shard`` and ``writes`` set.

        ``rank`` of ``ranks`` is its place among the tensor parallel ranks; ``cp`` and ``pp`` are pairs of its place and
        the number of context parallel ranks and of pipeline stages. A pool that is replicated in a direction is whole
        on every rank of it, and the first of them writes it. For a pool with ``covers`` the covered layers already tell
        the stage, so its ``shard`` does not name it.
        """
        places = {"tp": (rank, ranks), "cp": cp}
        parts = [(name, *at) for name, at in places.items() if name not in self.replicated]
        if not self.covers:
            parts.append(("pp", *pp))
        label = " ".join(f"{name} {number}/{count}" for name, number, count in parts if count > 1)
        writes = all(places[name][0] == 0 for name in self.replicated)
        return replace(self, shard=label or self.shard, writes=writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """All settings of an ``AsyncCache``. Each field says what it means; docs/configuration.md has them in tables.

    ``components``: one ``Full``, then at most one ``SlidingWindow``, then at most one ``Mamba``.
    Times are in seconds. Sizes are in tokens unless the setting's name says otherwise.
    """

    model: str = field(metadata=setting(
        "A name for the weights; part of every page hash, so caches of different models never share stored pages."))
    components: tuple[Component, ...]
    sidecars: tuple[Sidecar, ...] = ()
    page_size: int = field(default=16, metadata=setting("Tokens in a page, the unit of every tier.", 1, MOST_PAGE))
    device: str = field(default="cpu", metadata=setting(
        "Where the pages of the first tier are: `cpu`, `cuda:N`, `cuda:N?blocks=16` (see CUDA)."))
    storage: str | tuple[str, ...] | None = field(default=None, repr=False, metadata=setting(
        "The third tier: a URL such as `file:/var/kv?capacity=10GiB`, or several, nearest first (in the environment "
        "with spaces between them); `none`: there is no third tier."))
    write_policy: WritePolicy = field(default=WritePolicy.WRITE_THROUGH, metadata=setting(
        "When pages are copied to the host and to storage: at once, after their second use, or when they would be "
        "lost."))
    prefetch_policy: PrefetchPolicy = field(default=PrefetchPolicy.TIMEOUT, metadata=setting(
        "How long a request waits for storage: not at all, until all pages have arrived, or for a time."))
    eviction: str = field(default="p2c", metadata=setting(
        "The policy by which pages are evicted when a tier is full.", choices=eviction_policies))
    prefetch_threshold: int = field(default=256, metadata=setting(
        "How many tokens storage must hold beyond those on the host to make a prefetch worth it.", 0))
    prefetch_quota: float = field(default=0.5, metadata=setting(
        "Share of the host's pages that prefetches may hold at one time; one that has waited half a second for the "
        "others goes beyond it.", 0, 1))
    backup_quota: float = field(default=0.25, metadata=setting(
        "Share of the host's pages that may wait for storage; beyond it the oldest are dropped.", 0, 1))
    prefetch_timeout_base: float = field(default=1.0, metadata=setting(
        "With `timeout`: seconds that a request waits for its prefetch, whatever the length.", 0))
    prefetch_timeout_per_1k: float = field(default=0.25, metadata=setting(
        "With `timeout`: seconds that are added for each 1,024 tokens.", 0))
    prefetch_timeout_max: float = field(default=30.0, metadata=setting(
        "With `timeout`: seconds that a request waits at most.", above=0))
    load_back_threshold: int = field(default=0, metadata=setting(
        "A match on the host of fewer tokens is computed again and not loaded.", 0))
    max_backup_ops: int = field(default=256, metadata=setting(
        "How many copies from device to host are in flight at one time, at most.", 1))
    write_back_watermark: float = field(default=0.1, metadata=setting(
        "Share of the smaller of device and host that the device keeps free or saved in advance.", 0, 1))
    kept_fraction: float = field(default=0.25, metadata=setting("Share of the device's pages that `keep()` may pin.",
                                                                0, 1))
    close_deadline: float = field(default=30.0, metadata=setting(
        "Seconds that closing waits for pages that are still to be saved.", above=0))
    freeze_gc: bool = field(default=False, metadata=setting(
        "Whether the garbage collector is told to leave out the tree as it grows."))
    storage_options: dict[str, str] = field(default_factory=dict, repr=False, metadata=setting(
        "Options of the store, if there is one store; they win over those in its URL. All values are text."))

    def __post_init__(self) -> None:
        checks.check_fields(self)
        checks.text("model", self.model, empty=False)
        checks.choice("eviction", self.eviction, eviction_policies())
        checked = {
            "write_policy": checks.member("write_policy", self.write_policy, WritePolicy),
            "prefetch_policy": checks.member("prefetch_policy", self.prefetch_policy, PrefetchPolicy),
            "storage": _urls(self.storage),
            "storage_options": checks.texts("storage_options", self.storage_options),
            "components": _each("components", self.components, (Full, SlidingWindow, Mamba)),
            "sidecars": _each("sidecars", self.sidecars, (Sidecar,)),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        _check_components(self)
        self.pools()

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
        slots = tuple(
            ComponentSlots(_KIND[c.pool], _slots(c, self.page_size, host=False), _slots(c, self.page_size, host=True),
                           c.window if isinstance(c, SlidingWindow) else 0)
            for c in self.components
        )
        for component in slots:
            _check_numbers(component)
        names = {one.name for one in fields(CoreConfig)} & {one.name for one in fields(CacheConfig)}
        own: dict[str, Any] = {name: getattr(self, name) for name in names - {"components", "storage"}}
        return CoreConfig(components=slots, storage=bool(self.stores),
                          max_prefetch_pages=max(1, int(slots[0].host * self.prefetch_quota)), **own)

    def pools(self) -> tuple[PoolSpec, ...]:
        """Return every pool: those of the components, in their order, then the sidecars in theirs.

        Raises:
            ConfigError: two pools have the same name, an ``indices_from`` names no pool or closes a cycle, or a hit
                policy is not the one of the component whose slots the sidecar uses.
        """
        own = {spec.name: spec for spec in map(self._component_pool, self.components)}
        sidecars = {s.name: s for s in self.sidecars}
        if len(sidecars) < len(self.sidecars) or sidecars.keys() & own.keys():
            raise ConfigError(f"sidecars: pool names must be unique: {[s.name for s in self.sidecars]}")
        return (*own.values(), *(_sidecar_pool(s, own, sidecars) for s in self.sidecars))

    def _component_pool(self, component: Component) -> PoolSpec:
        kind = _KIND[component.pool]
        unit = component.state_bytes if isinstance(component, Mamba) else component.bytes_per_token * self.page_size
        return PoolSpec(
            name=component.pool, component=kind, bytes_per_page=unit, layers=component.layers,
            device_pages=_slots(component, self.page_size, host=False),
            host_pages=_slots(component, self.page_size, host=True),
            hit_policy=HitPolicy.ALL_PAGES if kind is ComponentKind.FULL else HitPolicy.TRAILING_PAGES,
            replicated=component.replicated.over, dtype=component.dtype, covers=component.covers,
        )


def split_urls(text: str) -> tuple[str, ...]:
    """Return the URLs in ``text``, which has spaces between them. A space that no scheme follows is part of a URL."""
    return tuple(re.split(r"\s+(?=[A-Za-z][A-Za-z0-9+.-]*:)", text.strip()))


def _urls(storage: object) -> str | tuple[str, ...] | None:
    if storage is None or isinstance(storage, str):
        return None if storage is None else checks.text("storage", storage)
    if not isinstance(storage, (tuple, list)) or not all(isinstance(url, str) for url in storage):
        raise ConfigError(f"storage: a URL, or several of them, and not an object of type {type(storage).__name__}")
    return tuple(checks.text("storage", url) for url in storage)


def _each(name: str, values: object, kinds: tuple[type[_T], ...]) -> tuple[_T, ...]:
    if not isinstance(values, (tuple, list)):
        raise ConfigError(f"{name}={checks.shown(values)} must be a tuple")
    return tuple(checks.instance(f"{name}[{at}]", value, kinds) for at, value in enumerate(values))


def _check_pool(pool: _PoolFields, where: str) -> None:
    """Check and convert all fields of a pool that can be checked without knowing the other pools. ``where`` names the
    pool in errors."""
    checks.check_fields(pool, f"{where}: ")
    replicated: object = pool.replicated
    if checks.is_flag(replicated):
        replicated = Replicated.TP_CP if replicated else Replicated.NO
    object.__setattr__(pool, "replicated", checks.member(f"{where}: replicated", replicated, Replicated))
    covers = pool.covers
    if not isinstance(covers, (tuple, list)):
        raise ConfigError(f"{where}: covers={checks.shown(covers)} must be a tuple of integers")
    covers = tuple(checks.integer(f"{where}: covers", layer, 0, MOST_LAYERS) for layer in covers)
    object.__setattr__(pool, "covers", covers)
    if covers and (len(covers) != pool.layers or list(covers) != sorted(covers)):
        raise ConfigError(f"{where}: covers={covers!r} must name a layer of the model for each of "
                          f"layers={pool.layers}, never falling")


def _slots(component: Component, page_size: int, *, host: bool) -> int:
    if isinstance(component, Mamba):
        return component.host_states if host else component.device_states
    return (component.host_tokens if host else component.device_tokens) // page_size


def _check_numbers(slots: ComponentSlots) -> None:
    for tier, count in (("device", slots.device), ("host", slots.host)):
        if count > INT32_MAX:
            name = POOL_NAME[slots.kind]
            raise ConfigError(f"{name}: {count} slots on the {tier}: at most {INT32_MAX} can be numbered")


def _sidecar_pool(spec: Sidecar, own: dict[str, PoolSpec], sidecars: dict[str, Sidecar]) -> PoolSpec:
    where = f"sidecar {spec.name!r}"
    if spec.bytes_per_page % spec.layers:
        raise ConfigError(f"{where}: bytes_per_page={spec.bytes_per_page} is not a multiple of layers={spec.layers}")
    root = _root(spec, own, sidecars)
    if spec.hit_policy is not None:
        _check_policy(where, spec.hit_policy, root)
    return PoolSpec(
        name=spec.name, component=root.component, bytes_per_page=spec.bytes_per_page, layers=spec.layers,
        device_pages=root.device_pages, host_pages=root.host_pages, hit_policy=root.hit_policy,
        indices_from=spec.indices_from, replicated=spec.replicated.over, dtype=spec.dtype, covers=spec.covers,
    )


def _root(spec: Sidecar, own: dict[str, PoolSpec], sidecars: dict[str, Sidecar]) -> PoolSpec:
    """Return the component's pool that is reached from ``spec`` by following ``indices_from``."""
    source, seen = spec.indices_from, {spec.name}
    while source not in own:
        if source in seen:
            raise ConfigError(f"sidecar {spec.name!r}: indices_from={source!r} closes a cycle")
        if source not in sidecars:
            raise ConfigError(f"sidecar {spec.name!r}: indices_from={source!r} is no pool")
        seen.add(source)
        source = sidecars[source].indices_from
    return own[source]


def _check_policy(where: str, policy: HitPolicy, root: PoolSpec) -> None:
    if policy is not root.hit_policy:
        raise ConfigError(
            f"{where}: hit_policy={policy.value!r}, but its slots are those of {root.name!r}, "
            f"which is needed as {root.hit_policy.value!r}"
        )


def _check_components(config: CacheConfig) -> None:
    kinds = [_KIND[c.pool] for c in config.components]
    if kinds[:1] != [ComponentKind.FULL] or sorted(set(kinds)) != kinds:
        raise ConfigError("components must be one Full, then at most one SlidingWindow, then at most one Mamba")
    for component in config.components:
        _check_component(component, config.page_size)
    hosts = [_slots(c, config.page_size, host=True) > 0 for c in config.components]
    if len(set(hosts)) > 1:
        raise ConfigError("components: either every component has host pages or none has")
    if config.stores and not hosts[0]:
        raise ConfigError("storage: it needs a host tier: host_tokens is 0")
    if config.storage_options and len(config.stores) > 1:
        raise ConfigError("storage_options: with several stores, options belong in their URLs")


def _check_component(component: Component, page_size: int) -> None:
    """Check that a component's room is whole pages, and that the bytes of a page can be divided among its layers."""
    name = component.pool
    if isinstance(component, Mamba):
        unit = component.state_bytes
    else:
        for field_name in ("device_tokens", "host_tokens"):
            value = getattr(component, field_name)
            if value % page_size:
                raise ConfigError(f"{name}: {field_name}={value} is not a multiple of page_size={page_size}")
        unit = component.bytes_per_token * page_size
    if unit % component.layers:
        raise ConfigError(f"{name}: {unit} bytes a page are not a multiple of layers={component.layers}")
