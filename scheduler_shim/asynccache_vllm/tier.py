"""The tier itself, as vLLM's ``TieringOffloadingManager`` uses it: in the scheduler's process, one call after another.

No call waits for a store, except ``drain_jobs`` and ``shutdown``, which have a deadline. When a store fails, exactly
the chunks of that call are misses, and vLLM computes them again.

Importing this module imports vLLM. It raises ImportError if vLLM's interface is not the one that this was written for.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import FrameType
from typing import Any, ClassVar

from asynccache.errors import AsyncCacheError, ConfigError, forget_frames
from asynccache.extras import installed
from asynccache.storage import RECORD_SCHEMA, Hint, Pages, RequestHints, Result, StoreLayout, check_stores, read_hints
from asynccache_vllm import namespace as naming
from asynccache_vllm.counts import (
    DESCRIPTIONS,
    DROPPED,
    HINTED,
    HINTS,
    LOADED,
    LOOKUPS,
    SKIPPED,
    STORED,
    UNHEARD,
    ChunkCounts,
)
from asynccache_vllm.hints import Successors, in_order, keys_of
from asynccache_vllm.interface import check_installed, check_interface, unsuitable
from asynccache_vllm.lookups import ChunkQuestion, KeyAnswer, KeyTable
from asynccache_vllm.options import TierOptions
from asynccache_vllm.transfers import STORE_TIMEOUT, ChunkTransfer, ChunkTransfers

check_installed()
try:
    import torch
    import vllm
    from vllm.config import VllmConfig, get_current_vllm_config_or_none
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.logger import init_logger
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ImportError(unsuitable(f"{error}")) from error

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # 0.32
    CacheHitSource = None

check_interface(
    SecondaryTierManager,
    {one.__name__: one for one in (TransferJob, JobResult, ScheduleEndContext, LookupResult)},
)

ATTENTION_LIBRARIES = ("flash-attn", "flashinfer-python", "aiter", "amd-aiter")
"""Distributions that vLLM uses for attention if they are installed."""

CLOSE_TIMEOUT = 3.0
"""Seconds that ``shutdown`` gives to the transfers that have begun."""
LETTING_GO = 5.0
"""Seconds after the transfers' deadlines for which ``drain_jobs`` waits for stores that still use their memory."""

_ANSWERS = {KeyAnswer.HIT: LookupResult.HIT, KeyAnswer.MISS: LookupResult.MISS, KeyAnswer.LATER: LookupResult.RETRY}

_log = init_logger("vllm.asynccache")


class AsyncCacheTier(SecondaryTierManager):  # type: ignore[misc]  # mypy may run where vLLM is not installed
    """asynccache's stores below vLLM's host memory, the nearest store first. ``TierOptions`` has what can be
    configured."""

    medium: ClassVar[Any] = Medium.STORAGE
    # vLLM 0.33 would ask for finished jobs from a thread of its own, each millisecond. Tried, and left: a request
    # learns of its load in the next step all the same (64 chunks at steps of 20 ms: 24 to 34 ms without, 22 to 44 ms
    # with it), while an idle engine spends 1 to 2 % of a core on it for ever, and a request 15 to 40 % more CPU time.
    # Also, vLLM takes ``get_stats`` without its lock, so the counters would need one. It is for tiers with peers.
    tolerates_off_thread_polling: ClassVar[bool] = False

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None,
        **given: Any,
    ) -> None:  # fmt: skip
        """Open the stores. vLLM calls this; ``given``: the other keys of the tier's entry of ``secondary_tiers``. If it
        fails, nothing is left open, and vLLM frees its memory.

        Raises:
            ConfigError: a value of the entry cannot be used, or the weights cannot be identified.
            Unavailable: a store cannot be opened now.
        """
        options = TierOptions.parse(given).placed(offloading_spec.config.parallel.data_parallel_index)
        chunks, page_bytes = primary_kv_view.shape or (0, 0)
        layout = StoreLayout({"pages": page_bytes}, RECORD_SCHEMA)
        for wrong in check_stores(options.storage, layout, options.store_options):
            raise wrong
        namespace, engine = _namespace(offloading_spec, options)
        pages = Pages.open(options.storage, primary_kv_view, page_bytes, namespace, options=options.store_options,
                           blocks=naming.block_named)  # fmt: skip
        try:
            super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        except BaseException:
            pages.close(0)
            raise
        self.locality = None if options.locality is None else Locality(options.locality)
        if CacheHitSource is not None:
            self.cache_hit_source = _hit_source(options)
        self.namespace = namespace
        self._pages = pages
        self._stores = ", ".join(pages.stores)
        self._timeout = options.lookup_timeout
        self._lookups = KeyTable(options.lookup_timeout)
        self._answers: deque[tuple[ChunkQuestion, list[Result], float]] = deque()
        self._transfers = ChunkTransfers(pages, page_bytes, chunks, options.lookup_timeout)
        self._tally = ChunkCounts(time.monotonic())
        self._groups = len(offloading_spec.config.groups)
        self._hinted = False
        self._hints: dict[str, RequestHints] = {}
        self._hints_due: dict[str, tuple[RequestHints, dict[bytes, int]]] = {}
        self._storing: Counter[str] = Counter()
        self._successors = Successors()
        self._hint_answers: deque[list[Result]] = deque()
        self._said: set[str] = set()
        self._over = self._closed = False
        self._events: list[Any] | None = None
        if options.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []
        elif options.enable_kv_events:
            _log.warning("asynccache: enable_kv_events is set, but vLLM publishes no KV events (kv_events_config)")
        _log.info(
            "asynccache: %s for %d chunks of %d bytes, namespace %s of %s", self._stores, chunks, page_bytes,
            naming.short(namespace), namespace,
        )  # fmt: skip
        _warn_of_hashes(engine)

    # lookups

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return the stores' answer about the chunk ``key``: HIT, MISS, or RETRY if they have not answered yet. Never
        waits."""
        if self._over:
            return LookupResult.MISS
        if self._answers:
            self._take_answers()
        hints = self._hints.get(req_context.req_id)
        if hints is not None and hints.prefetch:
            hints.prefetch = False
            self._hint(Hint.PREFETCH, [key for group in in_order(_positions(req_context)) for key, _ in group])
        return _ANSWERS[self._lookups.ask(key, req_context.req_id, time.monotonic())]

    def on_new_request(self, req_context: Any) -> Any:
        """Note a new request, and the hints that come with it. The answer leaves it to vLLM what is stored."""
        self._lookups.begin(req_context.req_id)
        envelope = getattr(req_context, "kv_hints", None)
        if envelope is not None:
            self._hinted = True
            hints, counts = read_hints(envelope)
            self._tally.add(HINTS, counts.elements())
            for verb in counts.keys() & {"unknown", "malformed"}:
                self._say_once(f"kv_hints: there are {verb} actions, which change nothing; their number is in {HINTS}")
            self._hints[req_context.req_id] = hints
            if hints.block_hashes:
                keys = keys_of(hints.block_hashes, self._groups)
                self._lookups.want(keys, time.monotonic())
                self._hint(Hint.PREFETCH, keys)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget the request. What its hints say of its chunks is told to the stores when these are stored."""
        request = req_context.req_id
        self._lookups.end(request)
        positions = _positions(req_context) if self._hinted else {}  # who sends no hints pays nothing for them
        for group in in_order(positions):
            self._successors.note([key for key, _ in group])
        hints = self._hints.pop(request, None)
        if hints is not None and (hints.keep or hints.ended):
            self._hints_due[request] = hints, positions
            if not self._storing[request]:
                self._tell_stores(request)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the stores for all keys of this step in one call, and take their answers to earlier ones."""
        now = time.monotonic()
        self._take_answers()
        self._lookups.begin_again(context.preempted_req_ids)
        self._lookups.tidy(now)
        question = self._lookups.take(now)
        if question is not None:
            self._ask(question)
        self._tell(now)

    def _ask(self, question: ChunkQuestion) -> None:
        if self._over or self._transfers.stuck:
            self._answers.append((question, [Result.FAILED] * len(question.keys), question.sent))
            return
        try:
            future = self._pages.exists(question.keys, timeout=self._timeout)
        except AsyncCacheError as error:  # this process is a fork, or an error has ended the stores' thread
            _log.error("asynccache: the stores are not used any more: %s", error)
            forget_frames(error)
            self._over = True
            self._answers.append((question, [Result.FAILED] * len(question.keys), question.sent))
            return
        future.add_done_callback(partial(self._answered, question))

    def _answered(self, question: ChunkQuestion, future: Future[list[Result]]) -> None:
        """Note an answer. Runs in the stores' thread."""
        failed = future.cancelled() or future.exception() is not None
        results = [Result.FAILED] * len(question.keys) if failed else future.result()
        self._answers.append((question, results, time.monotonic()))

    def _take_answers(self) -> None:
        while self._answers:
            question, results, arrived = self._answers.popleft()
            self._lookups.answer(question, results, arrived, time.monotonic())
            self._tally.add(LOOKUPS, results)
        while self._hint_answers:
            self._tally.add(HINTED, self._hint_answers.popleft())

    # hints

    def _tell_stores(self, request: str) -> None:
        """Tell the stores what the hints of a request that is over say of its chunks, if that is still to be told."""
        hints, positions = self._hints_due.pop(request, (None, {}))
        if hints is None:
            return
        for group in in_order(positions):
            keys = [key for key, _ in group]
            if hints.keep:
                most = hints.keep_end
                self._hint(Hint.KEEP, [key for key, end in group if most is None or end <= most], hints.keep)
            if hints.ended:
                start, begins = hints.ended_start, [0, *(end for _, end in group)]
                own = self._successors.private(keys) if start is None else [
                    key for key, at in zip(keys, begins, strict=False) if at >= start
                ]  # fmt: skip
                self._hint(Hint.ENDED, own)

    def _hint(self, verb: Hint, keys: Sequence[bytes], seconds: float = 0.0) -> None:
        if self._over or not keys:
            return
        if not self._pages.hintable:
            self._tally.add(HINTED, [UNHEARD] * len(keys))
            self._say_once(f"kv_hints: the stores ({self._stores}) take no hints, so {verb.name} changes nothing")
            return
        try:
            future = self._pages.hint(verb, keys, seconds, timeout=self._timeout)
        except AsyncCacheError as error:  # this process is a fork, or an error has ended the stores' thread
            forget_frames(error)
            return
        future.add_done_callback(partial(self._hint_answered, len(keys)))

    def _hint_answered(self, count: int, future: Future[list[Result]]) -> None:
        """Note an answer. Runs in the stores' thread."""
        failed = future.cancelled() or future.exception() is not None
        self._hint_answers.append([Result.FAILED] * count if failed else future.result())

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning("asynccache: %s", text)

    # vLLM's jobs

    def submit_store(self, job_metadata: Any) -> None:
        """Begin to store chunks. A chunk that a store has already is not written again."""
        transfer = _transfer(job_metadata, loading=False, patience=STORE_TIMEOUT)
        self._storing[transfer.request] += 1
        hints = self._hints.get(transfer.request)
        if hints is not None and hints.skip_store:
            self._transfers.skip(transfer)
            unstored = SKIPPED
        elif self._transfers.store(transfer):
            return
        else:
            unstored = DROPPED
        self._tally.add(STORED, [unstored] * len(transfer.keys))
        transfer.results = []  # they are counted already

    def submit_load(self, job_metadata: Any, **_: Any) -> None:
        """Begin to load chunks. Each part of the load may take ``lookup_timeout`` seconds; the chunks that arrived in
        time are used."""
        patience = self._lookups.left(job_metadata.keys)
        self._transfers.load(_transfer(job_metadata, loading=True, patience=patience))

    def get_finished_jobs(self) -> Iterable[Any]:
        """The jobs that have ended since the last call."""
        now = time.monotonic()
        finished = [self._finished(transfer, now) for transfer in self._transfers.ended()]
        if finished:
            self._tell(now)
        return finished

    def _finished(self, transfer: ChunkTransfer, now: float) -> Any:
        hits = [key for key, result in zip(transfer.keys, transfer.results, strict=False) if result is Result.HIT]
        success = len(hits) == len(transfer.keys)
        if transfer.loading:
            self._tally.add(LOADED, transfer.results)
            if not success:
                here = set(hits)
                self._lookups.lost([key for key in transfer.keys if key not in here], transfer.request, now)
                corrupt = [k for k, r in zip(transfer.keys, transfer.results, strict=True) if r is Result.CORRUPT]
                self._event(corrupt, removed=True)
        else:
            self._tally.add(STORED, transfer.results)
            self._lookups.stored(hits)
            self._event(hits, removed=False)
            self._storing[transfer.request] -= 1
            if not self._storing[transfer.request]:
                del self._storing[transfer.request]
                self._tell_stores(transfer.request)
        return JobResult(
            job_id=transfer.job_id,
            success=success,
            successful_keys=tuple(hits) if hits and transfer.loading and not success else None,
            transfer_time=transfer.seconds,
            transfer_bytes=len(hits) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until no store uses any of the region. The transfers that have begun end by their deadlines.

        Raises:
            RuntimeError: a store hangs and still uses memory, which vLLM must not use for anything else. So the reset
                that called this fails; it can be tried again.
        """
        held = self._transfers.drain(max(self._timeout, STORE_TIMEOUT) + LETTING_GO)
        if held:
            raise RuntimeError(
                f"asynccache: a store ({self._stores}) hangs and still uses the memory of {held} chunks, which cannot "
                f"be reset before the store lets go of them{self._why()}"
            )

    def shutdown(self) -> None:
        """End all transfers and close the stores; takes at most ``CLOSE_TIMEOUT`` and five seconds more, whatever the
        stores do. A second call does nothing."""
        if self._closed:
            return
        self._over = self._closed = True
        self._transfers.refuse()
        now = time.monotonic()
        if rest := self._tally.rest(now):
            _log.info("asynccache: %s", rest)
        try:
            closed = self._pages.close(CLOSE_TIMEOUT)
        except AsyncCacheError as error:
            _log.error("asynccache: %s", error)
            forget_frames(error)
            return
        stores = [transfer for transfer in self._transfers.ended() if not transfer.loading]
        if lost := sum(result is not Result.HIT for transfer in stores for result in transfer.results):
            _log.warning("asynccache: %d chunks were not stored before the shutdown", lost)
        if not closed.over:
            _log.error("asynccache: a store (%s) hangs and uses the memory of %d chunks until this process ends",
                       self._stores, closed.held)  # fmt: skip

    # events, metrics, log

    def take_events(self) -> Iterable[Any]:
        """The events since the last call: chunks that were stored, and chunks that were deleted because they were
        corrupt. Empty if ``enable_kv_events`` is not set."""
        if not self._events:
            return ()
        events, self._events = self._events, []
        return events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """The metrics that ``get_stats`` reports: counters of chunks by ``result``."""
        return {
            name: OffloadingCounterMetadata(documentation=text, labelnames=("result",))
            for name, text in DESCRIPTIONS.items()
        }

    def get_stats(self) -> Any | None:
        """The counts since the last call; None if there are none."""
        counts = self._tally.take()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for (metric, result), count in counts.items():
            stats.increase_counter(metric, count, (result,))
        return stats

    def _event(self, keys: Sequence[bytes], *, removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(
                OffloadingEvent(keys=list(keys), medium=self.medium, removed=removed, locality=self.locality)
            )

    def _tell(self, now: float) -> None:
        if complaint := self._tally.complaint(now):
            _log.warning("asynccache: %s%s", complaint, self._why())
        if summary := self._tally.summary(now):
            _log.info("asynccache: %s", summary)

    def _why(self) -> str:
        errors: Mapping[str, Exception] = self._pages.last_errors
        return "".join(f" ({name}: {error})" for name, error in errors.items())


def _positions(req_context: Any) -> dict[bytes, int]:
    """The chunks of a request, with the token that each ends at, as vLLM's scheduler notes them in the context; none in
    versions that do not."""
    return dict(getattr(req_context, "_offload_key_positions", None) or {})


def _hit_source(options: TierOptions) -> Any:
    """Return the source that vLLM counts hits under, which would be DISK by default. vLLM knows no stores behind a
    tier, so of several the farthest is named, and no hit counts as nearer than it was."""
    if options.locality == "REMOTE":
        return CacheHitSource.EXTERNAL_UNSPECIFIED
    near = {"memory": CacheHitSource.HOST, "host": CacheHitSource.HOST, "file": CacheHitSource.DISK}
    return CacheHitSource.outermost(
        near.get(url.partition(":")[0], CacheHitSource.EXTERNAL_UNSPECIFIED) for url in options.storage
    )


def _transfer(job: Any, *, loading: bool, patience: float) -> ChunkTransfer:
    slots = [int(chunk) for chunk in job.chunk_ids]
    return ChunkTransfer(job.job_id, job.req_context.req_id, list(job.keys), slots, loading=loading, patience=patience)


def _namespace(spec: Any, options: TierOptions) -> tuple[str, Any | None]:
    config = spec.config
    engine = _engine_config(config.extra_config)
    if config.canonical_layout and config.kv_cache_layout is None:
        raise ConfigError("canonical_layout: vLLM does not say which layout its KV cache has")
    canonical = canonical_mapping.canonical_format_id(config.kv_cache_layout) if config.canonical_layout else None
    weights = naming.weights_fact(engine, options.namespace)
    capability, fp8 = current_platform.get_device_capability(), current_platform.fp8_dtype()
    blocks = getattr(canonical_mapping, "CANONICAL_FORMAT_VERSION", None)
    where = {
        "device": current_platform.device_type,  # ROCm's is "cuda", too
        "capability": None if capability is None else str(capability), "fp8": str(fp8),
        "format": blocks,
    }  # fmt: skip
    kind = next((name for name in ("rocm", "cuda", "cpu") if getattr(current_platform, f"is_{name}")()), "another")
    if kind == "cpu":
        where["instructions"] = _instructions()
    if blocks is None or not naming.order_is_known(config, engine, kind):
        libraries = [name for name in ATTENTION_LIBRARIES if installed(name)]
        where |= naming.version_facts(options.compatible_with or vllm.__version__, libraries)
    facts = naming.environment_facts(os.environ)
    if engine is not None:
        facts |= naming.engine_facts(engine)
    else:
        _log.warning(
            "asynccache: vLLM's configuration of the engine was not found, so its dtype, quantization and overrides "
            "are not in the keys of chunks. The namespace %r must say them", options.namespace,
        )  # fmt: skip
    return naming.namespace_of(where, naming.layout_facts(config, canonical), facts, weights), engine


def _instructions() -> list[Any]:
    """The abilities of this CPU, by which vLLM's kernels for CPUs order the keys within a block."""
    can = [getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("amx_tile", "avx512", "avx2")]
    return [platform.machine(), *can]


def _warn_of_hashes(engine: Any | None) -> None:
    algorithm = "" if engine is None else str(engine.cache_config.prefix_caching_hash_algo)
    if algorithm.startswith("xxhash") and os.environ.get("PYTHONHASHSEED") is None:
        _log.warning(
            "asynccache: prefix_caching_hash_algo=%r gives chunks different keys in each process, so other processes "
            "do not find what this one stores. Use 'sha256', or set PYTHONHASHSEED to the same value everywhere",
            algorithm,
        )  # fmt: skip


def _engine_config(extra_config: Any) -> Any | None:
    """The ``VllmConfig`` whose ``kv_connector_extra_config`` is the object ``extra_config``; None if it is not found.

    vLLM's connector has the configuration when it builds the tier, but does not pass it on. So the configuration is
    looked for among the local variables of the calling functions, and recognized by ``extra_config``, which the tier
    was given.
    """
    for candidate in _candidates(sys._getframe(1)):
        transfer = candidate.kv_transfer_config
        if transfer is not None and transfer.kv_connector_extra_config is extra_config:
            return candidate
    return None


def _candidates(frame: FrameType | None) -> Iterator[Any]:
    current = get_current_vllm_config_or_none()
    if current is not None:
        yield current
    while frame is not None:
        yield from [one for one in frame.f_locals.values() if isinstance(one, VllmConfig)]
        frame = frame.f_back
