"""The class that SGLang loads, builds and calls.

``--hicache-storage-backend dynamic`` imports ``AsyncCacheStorage`` from here. SGLang first hands over its host pools.
Then its prefetch and backup threads call, each of them one batch at a time, and wait for the answer. Every call has a
deadline; pages for which no store has answered by then are misses. No call raises because a store fails.

Mutable state: the pools that SGLang registered, and the stores that were opened for them, behind ``_lock``.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from math import inf
from threading import RLock
from typing import Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from asynccache.errors import BackendError, ConfigError, Unavailable
from asynccache.storage import Hint, Pages, RequestHints, Result, read_hints
from asynccache_sglang import identity
from asynccache_sglang.hits import PoolPresence, fold, leading
from asynccache_sglang.moves import GRACE, MoveDirection, OpenedPool, PoolMove, StagingRows, move
from asynccache_sglang.options import placed, resolve
from asynccache_sglang.pools import DirectPages, source_of

logger = logging.getLogger(__name__)

KV = PoolName.KV.value
MOST_ROWS = 256
WARN_EVERY = 10.0
CLOSE_TIMEOUT = 10.0
MOST_SAMPLES = 4096


class AsyncCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """asynccache's stores as SGLang's L3.

    Raises, when it is constructed and when the pools are registered, so that SGLang refuses to attach it:
        ConfigError: an option cannot be used, or the weights that computed the pages cannot be identified.
        Unavailable: a store cannot be opened now.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        """SGLang calls this; ``kwargs`` is not used, and empty in the versions that this was tested with."""
        self.options = resolve(storage_config.extra_config)
        self._shard = storage_config
        self._server = _server()
        self.namespace = identity.namespace(
            identity.weights(self.options, self._server), storage_config.model_name, self._server, storage_config
        )
        ranks = {
            "tp_rank": storage_config.tp_rank, "pp_rank": storage_config.pp_rank,
            "dp_rank": storage_config.dp_rank, "cp_rank": storage_config.attn_cp_rank,
        }  # fmt: skip
        self._urls = placed(self.options.storage, ranks, storage_config.is_mla_model and storage_config.tp_size > 1)
        self._writes = storage_config.is_storage_writer
        self._metrics = _Metrics() if storage_config.enable_storage_metrics else None
        self._lock = RLock()
        self._host_pools: dict[str, Any] = {}
        self._pools: dict[str, OpenedPool] = {}
        self._pages: Pages | None = None
        self._closed = False
        self._warned: dict[str, float] = {}
        self.hint_counts: Counter[str] = Counter()

    # SGLang's pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of full attention's KV, or the anchor that stands for it."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another host pool, which may replace one of the same name. Stores that are open are closed; the next
        call opens them again for all pools."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Open the stores now, so that SGLang refuses to attach the backend if they cannot be opened."""
        self._opened()

    # KV pages

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many KV pages are stored before the first one that is not."""
        self._prefetch(keys, [KV], extra_info)
        return leading(self._there(keys, [KV])[KV])

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read KV pages into the host pool. Returns for each page whether it was read."""
        return self._move(MoveDirection.IN, [(KV, keys, host_indices)])[0]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store KV pages. Returns for each page whether it is stored."""
        hints = self._hints(extra_info)
        if hints is not None and hints.skip_store:
            return [False] * len(keys)
        stored = self._move(MoveDirection.OUT, [(KV, keys, host_indices)])[0]
        self._tell_stores(hints, KV, keys, extra_info)
        return stored

    # pages of several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:  # fmt: skip
        """Return which prefixes of ``keys`` can be restored; see ``hits``."""
        transfers = pool_transfers or []
        self._prefetch(keys, [KV, *(str(one.name) for one in transfers)], extra_info)
        there = self._there(keys, [KV, *(str(one.name) for one in transfers)])
        asked = [PoolPresence(str(one.name), there[str(one.name)], _window(one)) for one in transfers]
        hits = fold(KV, there[KV], asked)
        return PoolTransferResult(hits.pages, hits.by_pool, hits.restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools. Returns by the pool's name for each page whether it was read."""
        return self._move_transfers(MoveDirection.IN, transfers)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools. Returns by the pool's name for each page whether it is stored."""
        hints = self._hints(extra_info)
        if hints is not None and hints.skip_store:
            return {one.name: [False] * len(one.keys or []) for one in transfers}
        stored = self._move_transfers(MoveDirection.OUT, transfers)
        for one in transfers:
            self._tell_stores(hints, str(one.name), one.keys or [], extra_info)
        return stored

    # hints

    def _hints(self, extra_info: HiCacheStorageExtraInfo | None) -> RequestHints | None:
        """Return the hints of the request that a call is for, if SGLang passes them on: an envelope ``kv_hints`` among
        the call's extra info. What comes is counted (``hint_counts``), and what changes nothing is said."""
        more = None if extra_info is None else extra_info.extra_info
        envelope = more.get("kv_hints") if isinstance(more, dict) else None
        if envelope is None:
            return None
        hints, counts = read_hints(envelope)
        self.hint_counts.update(counts)
        for verb in counts.keys() & {"unknown", "malformed"}:
            self._warn(f"kv_hints {verb}", f"kv_hints: there are {verb} actions, which change nothing", once=True)
        return hints

    def _prefetch(self, keys: list[str], names: Sequence[str], extra_info: HiCacheStorageExtraInfo | None) -> None:
        hints = self._hints(extra_info)
        if hints is not None and hints.prefetch:
            for name in names:
                self._hint(Hint.PREFETCH, name, keys)

    def _tell_stores(
        self, hints: RequestHints | None, name: str, keys: list[str], extra_info: HiCacheStorageExtraInfo | None
    ) -> None:
        """Tell the stores what hints say of pages that were just stored, and of those before them (``prefix_keys``).
        Without a ``start`` only the pages just stored have ended: nobody here knows which of those before them others
        have, too."""
        if hints is None or name not in self._pools:
            return
        before = list(getattr(extra_info, "prefix_keys", None) or [])
        path, size = before + keys, self._pools[name].source.page_size
        if hints.keep:
            self._hint(Hint.KEEP, name, path[: None if hints.keep_end is None else hints.keep_end // size], hints.keep)
        if hints.ended:
            start = hints.ended_start
            self._hint(Hint.ENDED, name, keys if start is None else path[-(-start // size) :])

    def _hint(self, verb: Hint, name: str, keys: list[str], seconds: float = 0.0) -> None:
        try:
            pages, pool = self._opened(), self._pools.get(name)
            if pool is None or not keys:
                return
            if not pages.hintable:
                self.hint_counts["unheard"] += 1
                self._warn(f"kv_hints {verb.name}", f"the stores take no hints, so {verb.name} changes nothing",
                           once=True)  # fmt: skip
                return
            pages.hint(verb, identity.page_keys(keys, pool.behind), seconds, pool=name,
                       timeout=self.options.lookup_timeout)  # fmt: skip
        except Unavailable as error:
            self._warn("hint", f"no store is told of hints: {error}")

    # what SGLang calls without "interface_v1": 1, with copies of pages that it makes itself

    def _copies(self, *_: Any, **__: Any) -> Any:
        raise ConfigError('extra config: "interface_v1" is not 1')

    get = batch_get = set = batch_set = _copies

    def exists(self, key: str) -> bool:
        """Return True if the KV page is stored."""
        return self.batch_exists([key]) == 1

    # the whole

    def clear(self) -> bool:
        """Remove all pages under the stores' URLs, also those of other ranks, models and processes. Returns whether
        every store has done so within ``timeout`` seconds."""
        try:
            self._opened().clear(timeout=self.options.timeout).result(self.options.timeout + GRACE)
        except (BackendError, TimeoutError, CancelledError) as error:  # TimeoutError: a store hangs
            logger.error("asynccache: the stores were not cleared: %r", error)
            return False
        logger.info("asynccache: cleared %s", ", ".join(self._opened().stores))
        return True

    def get_stats(self) -> Any:
        """Return figures for SGLang's metrics: pages and GiB/s of each batch of KV pages since the last call. None if
        metrics are not enabled."""
        return None if self._metrics is None else self._metrics.take()

    def store_stats(self) -> Mapping[str, Mapping[str, int | float]]:
        """The statistics of each store, by its name."""
        return self._opened().store_stats()

    def close(self) -> None:
        """Let the calls that have begun go on for ``CLOSE_TIMEOUT`` seconds, and close the stores. Pages of later
        calls are misses. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._close_pages()

    # internals

    def _register(self, name: str, host_pool: Any) -> None:
        with self._lock:
            if self._host_pools.get(name) is not host_pool:
                self._host_pools[name] = host_pool
                self._close_pages()

    def _close_pages(self) -> None:
        pages, self._pages, self._pools = self._pages, None, {}
        if pages is None:
            return
        try:
            closed = pages.close(CLOSE_TIMEOUT)
        except BackendError as error:
            logger.error("asynccache: %s", error)
            return
        if closed.held:
            logger.warning("asynccache: closed, but a store still uses %d pages of SGLang's pools", closed.held)

    def _opened(self) -> Pages:
        """The stores, opened for the pools that are registered.

        Raises:
            ConfigError, Unavailable: see the class.
        """
        if self._pages is not None:
            return self._pages
        with self._lock:
            if self._closed:
                raise Unavailable("asynccache: the storage backend was closed")
            if self._pages is None:
                pools = {name: self._pool(name, host_pool) for name, host_pool in self._host_pools.items()}
                if not pools:
                    raise Unavailable("asynccache: SGLang has registered no host pool yet")
                memory = {
                    name: pool.source.memory if isinstance(pool.source, DirectPages) else pool.rows.memory
                    for name, pool in pools.items()
                }
                sizes = {name: sum(pool.source.parts) for name, pool in pools.items()}
                options = self.options.store_options
                self._pages = Pages.open(self._urls, memory, sizes, self.namespace, options=options,
                                         blocks=identity.block_named)  # fmt: skip
                self._pools = pools
                self._tell_opened(self._pages)
            return self._pages

    def _pool(self, name: str, host_pool: Any) -> OpenedPool:
        sharded = not self._shard.is_mla_model or _is_sharded(name, host_pool)
        source = source_of(name, host_pool)
        page_bytes = sum(source.parts)
        rows = 0 if isinstance(source, DirectPages) else max(1, min(MOST_ROWS, self.options.staging // page_bytes))
        layout = f"{getattr(host_pool, 'layout', None)} {source.how} {identity.rows_of(host_pool)}"
        known = identity.order_is_known(host_pool, self._server.kv_cache_dtype)
        sglang = None if known else self.options.compatible_with or self._server.sglang
        kind = identity.PageMake(layout, _dtypes(host_pool), source.page_size, source.parts, sharded, sglang)
        return OpenedPool(name, source, identity.suffix(kind, self._shard), StagingRows(page_bytes, rows), sharded)

    def _tell_opened(self, pages: Pages) -> None:
        logger.info("asynccache: stores %s, nearest first, namespace %s", ", ".join(pages.stores), self.namespace)
        for pool in self._pools.values():
            how = "in place" if isinstance(pool.source, DirectPages) else f"by {len(pool.rows.memory)} rows of staging"
            logger.info(
                "asynccache: pool %s: %d bytes a page, moved %s, %s", pool.name, sum(pool.source.parts), how,
                "each rank's own" if pool.sharded else "one rank writes for all",
            )  # fmt: skip

    def _there(self, keys: Sequence[str], names: Sequence[str]) -> dict[str, list[bool]]:
        """Return for each of the pools ``names`` whether each page is stored."""
        found = {name: [False] * len(keys) for name in names}
        if not keys:
            return found
        asked: dict[str, Future[list[Result]]] = {}
        try:
            pages = self._opened()
            for name in found:
                pool = self._pools.get(name)
                if pool is None:
                    self._warn(name, f"pool {name} was not registered: its pages are misses")
                    continue
                asked[name] = pages.exists(
                    identity.page_keys(keys, pool.behind), pool=name, timeout=self.options.lookup_timeout
                )
        except Unavailable as error:
            self._warn("exists", f"nothing is looked up: {error}")
        for name, future in asked.items():
            results = future.result()
            found[name] = [result is Result.HIT for result in results]
            failed = results.count(Result.FAILED)
            if failed and self._pages is not None:
                self._warn(f"look up {name}", f"for {failed} of {len(results)} pages of pool {name} it is not known "
                           f"whether they are stored{_why(self._pages)}")  # fmt: skip
        return found

    def _move_transfers(self, way: MoveDirection, transfers: Sequence[PoolTransfer]) -> dict[str, list[bool]]:
        wanted = [(str(one.name), one.keys or [], one.host_indices) for one in transfers]
        done = self._move(way, wanted)
        return {one.name: moved for one, moved in zip(transfers, done, strict=True)}

    def _move(
        self, way: MoveDirection, wanted: Sequence[tuple[str, list[str], torch.Tensor | None]]
    ) -> list[list[bool]]:
        """Move pages of several pools, each given as (pool, keys, host indices). Returns for each page whether it was
        moved."""
        done = [[False] * len(keys) for _, keys, _ in wanted]
        try:
            pages = self._opened()
        except Unavailable as error:
            self._warn(way.value, f"nothing is moved {way.value}: {error}")
            return done
        moves: dict[int, PoolMove] = {}
        for at, (name, keys, where) in enumerate(wanted):
            pool = self._pools.get(name)
            if pool is None:
                self._warn(name, f"pool {name} was not registered: its pages are not moved")
            elif way is MoveDirection.OUT and not pool.sharded and not self._writes:
                done[at] = [True] * len(keys)  # the first rank writes these pages for all
            elif (indices := self._indices(pool, len(keys), where)) is not None:
                moves[at] = PoolMove(pool, identity.page_keys(keys, pool.behind), indices)
        began = time.perf_counter()
        move(pages, way, list(moves.values()), self.options.timeout)
        seconds = time.perf_counter() - began
        for at, one in moves.items():
            done[at] = one.done
            if failed := one.failed:
                self._warn(f"{way.value} {one.pool.name}", f"{failed} of {len(one.keys)} pages of pool "
                           f"{one.pool.name} were not moved {way.value}{_why(pages)}")  # fmt: skip
            if self._metrics is not None and one.pool.name == KV and any(one.done):
                self._metrics.add(way, one.done.count(True), sum(one.pool.source.parts), seconds)
        return done

    def _indices(self, pool: OpenedPool, count: int, where: torch.Tensor | None) -> list[int] | None:
        """The first index of each of ``count`` pages; None if they cannot be moved, which is logged."""
        size = pool.source.page_size
        if where is None or where.numel() != count * size:
            logger.error(
                "asynccache: %d host indices for %d pages of %d in pool %s: nothing is moved",
                0 if where is None else where.numel(), count, size, pool.name,
            )  # fmt: skip
            return None
        indices: list[int] = where[::size].tolist()
        return indices

    def _warn(self, about: str, text: str, *, once: bool = False) -> None:
        """Log a warning, at most once in ``WARN_EVERY`` seconds for each ``about``, because a store that fails fails
        for every call. ``once``: only once."""
        now = time.monotonic()
        if now - self._warned.get(about, -WARN_EVERY) >= WARN_EVERY:
            self._warned[about] = inf if once else now
            logger.warning("asynccache: %s", text)


class _Metrics:
    """Samples for SGLang's metrics. SGLang's threads add samples, and its scheduler takes them."""

    def __init__(self) -> None:
        self._samples: deque[tuple[MoveDirection, int, float]] = deque(maxlen=MOST_SAMPLES)

    def add(self, way: MoveDirection, pages: int, page_bytes: int, seconds: float) -> None:
        self._samples.append((way, pages, pages * page_bytes / (1 << 30) / max(seconds, 1e-9)))

    def take(self) -> Any:
        from sglang.srt.observability.metrics_collector import StorageMetrics

        made = StorageMetrics()
        while self._samples:
            way, pages, rate = self._samples.popleft()
            (made.prefetch_pgs if way is MoveDirection.IN else made.backup_pgs).append(pages)
            (made.prefetch_bandwidth if way is MoveDirection.IN else made.backup_bandwidth).append(rate)
        return made


def _server() -> identity.ServerOptions:
    """The options that SGLang was started with; only its version and the device, if its arguments cannot be read."""
    from sglang.srt.runtime_context import get_server_args

    try:
        args = get_server_args()
    except Exception:
        args = None
    if args is None:
        return identity.ServerOptions(sglang.__version__, device=_device())
    lora = bool(getattr(args, "enable_lora", None) or getattr(args, "lora_paths", None))
    found = [getattr(args, name, None) for name in identity.ServerOptions._fields[3:]]
    texts = [None if value is None else str(getattr(value, "value", value)) for value in found]
    return identity.ServerOptions(sglang.__version__, lora, _device(), *texts)


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    return f"{'hip' if torch.version.hip else 'cuda'} {torch.cuda.get_device_capability()}"


def _is_sharded(name: str, host_pool: Any) -> bool:
    """Return True if the ranks have different pages of this pool even if the model's KV is replicated. That holds for
    recurrent states, and for the K and V of a draft model."""
    kinds = {one.__name__ for one in type(host_pool).__mro__}
    return name == PoolName.MAMBA.value or "MHATokenToKVPoolHost" in kinds


def _dtypes(host_pool: Any) -> tuple[str, ...]:
    """All attributes of a pool that are dtypes. A pool of Mamba states has one for convolutions and one for
    recurrences."""
    found = {"dtype": getattr(host_pool, "dtype", None)} | vars(host_pool)
    return tuple(f"{name} {value}" for name, value in sorted(found.items()) if isinstance(value, torch.dtype))


def _window(transfer: PoolTransfer) -> int | None:
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return None
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return max(1, len(transfer.keys or ()))
    raise ConfigError(f"hit_policy={transfer.hit_policy} of pool {transfer.name} is not known to this backend")


def _why(pages: Pages) -> str:
    errors = "; ".join(f"{name}: {error}" for name, error in pages.last_errors.items())
    return f" ({errors})" if errors else ""
