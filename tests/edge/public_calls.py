"""Every public function and method with parameters: how it is called, and what each of its parameters takes.

A parameter that is new must be entered here: a test compares these tables with the signatures.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import secrets
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

from asynccache_backends.memory import MemoryBackend
from asynccache_shim import Limits, Request, Sampling, Scheduler, SchedulerConfig, follow
from asynccache_shim.request import MAX_TOKEN
from msgspec.structs import replace

from asynccache import (
    Adapter,
    AsyncCache,
    CacheConfig,
    ConfigError,
    Full,
    HitPolicy,
    Mamba,
    PrefetchHandle,
    PrefetchPolicy,
    Sidecar,
    SlidingWindow,
    WritePolicy,
    components_from,
    load_config,
)
from asynccache.core.plan import Cleared
from asynccache.events import BlockStored, EventBatch, EventLayout, Mirror, Subscriber, ZmqPublisher
from asynccache.metrics import CacheCollector, LoopLag, app, start_metrics_server
from asynccache.storage import (
    KEY_BYTES,
    Breaker,
    CheckedStore,
    Hint,
    OpenCalls,
    PageKey,
    Pages,
    ParsedUrl,
    RequestHints,
    Result,
    StoreLayout,
    StoreOptions,
    ThreadPool,
    backend_class,
    check_store,
    check_stores,
    completed,
    completed_in_thread,
    open_store,
    parse_host_port,
    parse_size,
    parse_url,
    read_hints,
    settled,
    take_options,
    weights_digest,
)
from asynccache.worker import RankWorker, Topology
from asynccache.worker.local import EmbedderParts as NothingGiven
from asynccache.worker.rank_server import RankServer
from tests.edge.edge_kit import (
    Case,
    Depends,
    Flag,
    Function,
    Integer,
    Kind,
    Member,
    Namespace,
    Number,
    OneOf,
    Text,
    These,
    Thing,
    Tokens,
    Unchecked,
    World,
    called,
)
from tests.runtime.runtime_kit import LAYERS, PAGE
from tests.simulated.backend import SimulatedBackend

Given = Mapping[str, Any]
Params = Mapping[str, Kind | Unchecked]

INT32 = 2**31 - 1
SHARE = Number(0, 1)
SECONDS = Number(0)
COUNT = Integer(1)
TEXTS = These("{}")
WITHIN = Number(above=0, optional=True)
OF_ONE_POOL = These("None")
SLOTS = Depends(Tokens(1))
NAMES = {"url": "storage", "text": "storage", "scheme": "storage", "endpoint": "events", "replay": "events"}
EVENT = Thing(optional=True)
INTEGERS = These("[]", "[8]", "(8,)", "[-8]", "[2**31]")
EMPTY = These("[]", "{}", "''", "b''")


# plain functions and classes


def plain(function: Callable[..., Any], params: Params, **good: Any) -> Case:
    """A function without a cache; what it makes is closed."""

    async def call(world: World, given: Given) -> None:
        made = function(**{**good, **given})
        if inspect.isawaitable(made):
            made = await made
        if isinstance(made, (ZmqPublisher, Subscriber)):
            made.close()
        if isinstance(made, CheckedStore):
            await made.aclose()

    return Case(call, params, names=NAMES)


WEIGHTS = NamedTemporaryFile(suffix=".bin")  # noqa: SIM115  # it is there as long as this module
MANY = Integer(1, 65536)
ROOM = OneOf(Integer(1), Depends(Text()))
FULL = Full(bytes_per_token=16, device_tokens=1024, host_tokens=1024)
POOL: Params = {
    "layers": Depends(Integer(1, 65536)), "covers": OneOf(These("[]"), Depends(Tokens())), "dtype": Text(),
    "replicated": Flag(),
}  # fmt: skip
TOKENS: Params = {
    "bytes_per_token": Integer(0), "device_tokens": OneOf(COUNT, Depends(Text())),
    "host_tokens": OneOf(Integer(0), Depends(Text())), "kv_heads": These("0"), "head_dim": These("0"),
}

SETTINGS: Params = {
    "model": Depends(Text()), "components": These(), "sidecars": These("[]"),
    "page_size": Integer(1, 65536), "device": Text(), "storage": OneOf(Depends(Text()), These("None", "[]", "['8']")),
    "write_policy": Member(), "prefetch_policy": Member(), "eviction": Text(("lru", "p2c")),
    "prefetch_threshold": Integer(0), "prefetch_quota": SHARE, "backup_quota": SHARE,
    "prefetch_timeout_base": SECONDS, "prefetch_timeout_per_1k": SECONDS, "prefetch_timeout_max": Number(above=0),
    "load_back_threshold": Integer(0), "max_backup_ops": COUNT, "write_back_watermark": SHARE,
    "kept_fraction": SHARE, "close_timeout": Number(above=0), "freeze_gc": Flag(),
    "storage_options": TEXTS,
}  # fmt: skip


async def _config(world: World, given: Given) -> None:
    config = CacheConfig(**{"model": "m", "components": (FULL,), **given})
    (name,) = given
    value = getattr(config, name)
    assert type(value) in (int, float, bool, str, tuple, dict, type(None), WritePolicy, PrefetchPolicy)
    assert replace(config) == config


def _other(make: Callable[..., Any], **good: Any) -> Callable[..., Any]:
    """``make``, whose other settings, of which ``replicated`` stands for all, are called ``more``."""

    async def call(world: World, given: Given) -> None:
        more = {"replicated": given["more"]} if "more" in given else {}
        make(**{**good, **{name: value for name, value in given.items() if name != "more"}, **more})

    return call


async def _one_setting(world: World, given: Given) -> None:
    """``load_config`` takes any setting by its name."""
    settings = {name: value for name, value in given.items() if name in ("path", "env")}
    if "given" in given:
        settings["page_size"] = given["given"]
    load_config(**{"model": "m", "components": (FULL,), "page_size": 16, "env": {}, **settings})


def _backend() -> SimulatedBackend:
    return SimulatedBackend(random.Random(0))


LAYOUT = StoreLayout({"full": 64}, b"schema")


async def _checked_store(world: World, given: Given) -> None:
    store = CheckedStore(**{"backend": _backend(), "layout": LAYOUT, "threads": 0, **given})
    await store.aclose()


class _Listed(SimulatedBackend):
    """A store that can be read through, and has nothing."""

    def parts(self) -> list[Any]:
        return []

    async def scrub(self, part: Any, verify: Any) -> Any:
        raise NotImplementedError


_FIELDS: Params = {
    "page_bytes": These("{}", "{'a': 1}"), "schema": These("b'8'", "b''", "bytes of a token"),
}  # fmt: skip


def _layout(**fields: Any) -> StoreLayout:
    return StoreLayout(**{"page_bytes": {"full": 64}, "schema": b"schema", **fields})


async def _layout_checked(world: World, given: Given) -> None:
    check_store("memory:", _layout(**given))


async def _layout_of_a_store(world: World, given: Given) -> None:
    await CheckedStore(_backend(), _layout(**given), threads=0).aclose()


async def _register(world: World, given: Given) -> None:
    store = CheckedStore(_backend(), LAYOUT, threads=0)
    await called(store.register, {"pool": "full", "memory": memoryview(bytearray(64))}, given)
    await store.aclose()


async def _scrub(world: World, given: Given) -> None:
    store = CheckedStore(_Listed(random.Random(0)), LAYOUT, threads=0)
    await called(store.scrub, {}, given)
    await store.aclose()


async def _check_stores(world: World, given: Given) -> None:
    """What is wrong with the URLs is returned: the first of it is raised here."""
    for error in check_stores(**{"urls": ["memory:"], "layout": LAYOUT, **given}):
        raise error


def of_breaker(method: str, params: Params, *good: str) -> Case:
    async def call(world: World, given: Given) -> None:
        breaker = Breaker(1)
        arguments = {"permit": breaker.allow(0.0), "now": 0.0}
        await called(getattr(breaker, method), {name: arguments[name] for name in good}, given)

    return Case(call, params)


PAGE_KEY = PageKey("full", bytes(KEY_BYTES))


def of_store(method: str, params: Params, **good: Any) -> Case:
    """A method of a ``CheckedStore``, which serves a page afterwards."""

    async def call(world: World, given: Given) -> None:
        store = CheckedStore(MemoryBackend(), LAYOUT, threads=0)
        try:
            await called(getattr(store, method), good, given)
        finally:
            page, back = memoryview(bytearray(b"x" * 64)), memoryview(bytearray(64))
            key = [PageKey("full", b"y" * KEY_BYTES)]
            assert (await store.put(key, [page]), await store.get(key, [back])) == ([Result.HIT], [Result.HIT])
            assert back == page
            await store.aclose()

    return Case(call, params)


def of_url(method: str, params: Params, **good: Any) -> Case:
    return plain(getattr(ParsedUrl("memory", options={}), method), params, **good)


async def _pages_open(world: World, given: Given) -> None:
    async def opened(**arguments: Any) -> None:
        Pages.open(**arguments).close()

    good = {"storage": MemoryBackend(), "memory": bytearray(8192), "page_bytes": 4096, "namespace": "m"}
    await called(opened, good, given)


def of_pages(method: str, params: Params, **good: Any) -> Case:
    """A method of ``Pages``, which serve a page afterwards."""

    async def call(world: World, given: Given) -> None:
        memory = world.once("memory", lambda: nullcontext(bytearray(6)))
        pages = world.once("pages", lambda: Pages.open(MemoryBackend(), memory, 2, "m"))
        memory[:2] = secrets.token_bytes(2)

        async def answered(**arguments: Any) -> None:
            getattr(pages, method)(**arguments).result(60)

        try:
            await called(answered, good, given)
        finally:
            assert pages.stats()["calls_in_flight"] == 0
            key = [bytes(memory[:2])]
            assert pages.put(key, [0]).result(60) == [Result.HIT]
            assert pages.get(key, [2]).result(60) == [Result.HIT]
            assert memory[:2] == memory[4:]

    return Case(call, params)


async def _pages_close(world: World, given: Given) -> None:
    with Pages.open(MemoryBackend(), bytearray(2), 2, "m") as pages:
        await called(pages.close, {}, given)


async def _work(world: World, given: Given) -> None:
    workers = ThreadPool(1, "edge")
    try:
        await called(workers.call, {"function": lambda: 8}, given)
    finally:
        workers.close()


async def _submitted(world: World, given: Given) -> None:
    workers = ThreadPool(1, "edge")
    try:
        future = await called(lambda function: workers.submit(function), {"function": lambda: 8}, given)
        await asyncio.wrap_future(future)
    finally:
        workers.close()


async def _run_for(world: World, given: Given) -> None:
    workers = ThreadPool(1, "edge")
    try:
        await called(workers.run_for, {"size": 1 << 30, "function": lambda: 8}, given)
    finally:
        workers.close()


async def _spread(world: World, given: Given) -> None:
    workers = ThreadPool(1, "edge")
    try:
        await called(workers.spread, {"function": lambda *_: 8, "sizes": [1 << 30]}, given)
    finally:
        workers.close()


async def _run(world: World, given: Given) -> None:
    workers = ThreadPool(1, "edge")
    try:
        await called(workers.run, {"function": lambda: 8}, given)
    finally:
        workers.close()


async def _completed(world: World, given: Given) -> None:
    await called(completed, {"work": asyncio.sleep(0)}, given)


async def _completed_in_thread(world: World, given: Given) -> None:
    await called(completed_in_thread, {"function": int}, given)


async def _settled(world: World, given: Given) -> None:
    done = asyncio.get_running_loop().create_future()
    done.set_result(8)
    await called(settled, {"futures": [done]}, given)


def _stored(**fields: Any) -> BlockStored:
    return BlockStored(**{
        "block_hashes": [8], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2, "lora_id": None,
        "medium": "GPU", "lora_name": None, **fields,
    })  # fmt: skip


def of_mirror(method: str, params: Params, make: Callable[..., Any]) -> Case:
    """A method of a ``Mirror``, which knows of nothing that was refused."""

    async def call(world: World, given: Given) -> None:
        mirror = Mirror()
        try:
            getattr(mirror, method)(make(**given))
        except ConfigError:
            assert not any(mirror.blocks.values())
            raise

    return Case(call, params)


async def _notice(world: World, given: Given) -> None:
    with ZmqPublisher("inproc://edge-notice") as publisher:
        await called(publisher, {"notice": Cleared()}, given)
    assert publisher.error is None


async def _publisher_close(world: World, given: Given) -> None:
    publisher = ZmqPublisher("inproc://edge-close")
    await called(publisher.close, {}, given)
    publisher.close()


async def _receive(world: World, given: Given) -> None:
    with Subscriber("inproc://edge-receive") as subscriber:
        received = await called(subscriber.receive, {"timeout": 0}, given)
        assert hasattr(received, "__next__")


async def _metrics_app(world: World, given: Given) -> None:
    await called(app, {"cache": world.cache}, given)


async def _metrics_server(world: World, given: Given) -> None:
    async def served(**arguments: Any) -> None:
        async with await start_metrics_server(**arguments):
            pass

    await called(served, {"cache": world.cache}, given)


async def _collector(world: World, given: Given) -> None:
    await called(CacheCollector, {"cache": world.cache}, given)


async def _request(world: World, given: Given) -> None:
    await called(Request, {"tokens": [1, 2, 3]}, given)


def _drawn(**fields: Any) -> Request:
    return Request([1, 2, 3], sampling=Sampling(**fields))


async def _next_token(world: World, given: Given) -> None:
    request = Request([1, 2, 3])
    request.abort()
    await called(request.next_token, {"index": 0}, given)


class _Model:
    def forward(self, batch: Any) -> list[int]:
        return [7 if chunk.sample else -1 for chunk in batch.chunks]


async def _scheduler(world: World, given: Given) -> None:
    await called(Scheduler, {"cache": world.cache, "model": _Model()}, given)


async def _submit(world: World, given: Given) -> None:
    async with Scheduler(world.cache, _Model()) as scheduler:
        await called(lambda request: scheduler.submit(request), {"request": Request(world.prompt())}, given)


async def _aclose_scheduler(world: World, given: Given) -> None:
    scheduler = await Scheduler(world.cache, _Model()).__aenter__()
    await called(scheduler.aclose, {"error": None}, given)


async def _late_attribute(world: World, given: Given) -> None:
    """A request's attributes may be set until it is submitted: they are looked at then."""
    async with Scheduler(world.cache, _Model()) as scheduler:

        async def submit(**attributes: Any) -> None:
            request = Request(world.prompt(), Limits(1))
            for name, value in attributes.items():
                setattr(request, name, value)
            scheduler.submit(request)
            request.abort()

        await called(submit, {}, given)


async def _follow(world: World, given: Given) -> None:
    server = RankServer(1, Topology(tp=2), NothingGiven(), None, lambda _: None)
    server.batches.finish(None)  # the cache is closed
    await called(follow, {"worker": RankWorker(server), "model": _Model()}, given)


# the cache


def of_cache(method: str, params: Params, **good: Any) -> Case:
    async def call(world: World, given: Given) -> None:
        arguments = {"tokens": world.prompt(), **good} if "tokens" in params else good
        await called(getattr(world.cache, method), arguments, given)

    return Case(call, params, books=True)


async def _new_cache(world: World, given: Given) -> None:
    await called(AsyncCache, {"config": world.cache.config}, given)


async def _lease(world: World, given: Given) -> None:
    async def entered(**terms: Any) -> None:
        async with world.cache.lease(**terms) as lease:
            await lease.loaded()

    await called(entered, {"tokens": world.prompt()}, given)


async def _prefetch(world: World, given: Given) -> None:
    async def fetched(**arguments: Any) -> None:
        await world.cache.prefetch(**arguments)

    await called(fetched, {"tokens": world.prompt(1)}, given)


async def _keep(world: World, given: Given) -> None:
    async def kept(**arguments: Any) -> None:
        (await world.cache.keep(**arguments)).release()

    await called(kept, {"tokens": world.prompt(1)}, given)


async def _aclose(world: World, given: Given) -> None:
    cache = world.cache
    try:
        await cache.aclose(**given)
    finally:
        if cache.closed is not None:
            await world.reopen()


async def _attach(world: World, given: Given) -> None:
    async def and_detach(**arguments: Any) -> None:
        await world.cache.detach_storage(await world.cache.attach_storage(**arguments), timeout=0)

    await called(and_detach, {"storage": MemoryBackend(), "name": "other"}, given)


async def _detach(world: World, given: Given) -> None:
    async def attached(**arguments: Any) -> None:
        if "other" not in world.cache.stores:
            await world.cache.attach_storage(MemoryBackend(), name="other", backfill=False)
        await world.cache.detach_storage(**arguments)

    await called(attached, {"name": "other"}, given)
    if "other" in world.cache.stores:
        await world.cache.detach_storage("other", timeout=0)


# leases


def of_lease(
    method: str, params: Params, good: Callable[[World, Any], Given] = lambda world, lease: {}
) -> Case:
    async def call(world: World, given: Given) -> None:
        async with world.lease() as lease:
            await called(getattr(lease, method), good(world, lease), given)

    return Case(call, params, books=True)


def _commits(world: World, lease: Any) -> Given:
    prompt = world.prompt()
    return {"tokens": prompt, "checkpoint": (len(prompt) // PAGE * PAGE, lease.states[1])}


async def _commit_position(world: World, given: Given) -> None:
    async with world.lease() as lease:
        good = _commits(world, lease)["checkpoint"]

        async def commit(position: Any) -> None:
            await lease.commit(world.prompt(), checkpoint=(position, lease.states[1]))

        await called(commit, {"position": good[0]}, given)


async def _commit_slot(world: World, given: Given) -> None:
    async with world.lease() as lease:
        position, good = _commits(world, lease)["checkpoint"]

        async def commit(slot: Any) -> None:
            await lease.commit(world.prompt(), checkpoint=(position, slot))

        await called(commit, {"slot": good}, given)


class _Stream:
    name = "engine"

    def record(self) -> Any:
        raise NotImplementedError

    def wait_event(self, event: Any) -> None:
        pass


CALLS: dict[str, Case] = {
    # the configuration
    "asynccache.CacheConfig": Case(_config, SETTINGS),
    "asynccache.Full": plain(Full, {**TOKENS, **POOL}, bytes_per_token=16, device_tokens=64),
    "asynccache.SlidingWindow": plain(
        SlidingWindow, {"window": COUNT, **TOKENS, **POOL}, window=8, bytes_per_token=16, device_tokens=64
    ),
    "asynccache.Mamba": plain(
        Mamba,
        {"state_bytes": COUNT, "device_states": ROOM, "host_states": OneOf(Integer(0), Depends(Text())),
         "parts": These("[]"), **POOL},
        state_bytes=64, device_states=4,
    ),
    "asynccache.Sidecar": plain(
        Sidecar,
        {"name": Depends(Text()), "indices_from": Text(), "bytes_per_page": COUNT, "hit_policy": Member(optional=True),
         **POOL},
        name="s", indices_from="full", bytes_per_page=64, hit_policy=HitPolicy.ALL_PAGES,
    ),
    **{f"asynccache.{cls.__name__}.attention": Case(
        _other(cls.attention, layers=2, kv_heads=2, head_dim=8, device=64, **more),
        {"layers": MANY, "kv_heads": MANY, "head_dim": MANY, "device": ROOM, "host": OneOf(Integer(0), Depends(Text())),
         "dtype": Depends(Text()), "more": Flag()},
        names={"device": "device_tokens", "host": "host_tokens", "more": "replicated"},
    ) for cls, more in ((Full, {}), (SlidingWindow, {"window": 8}))},
    "asynccache.Mamba.recurrent": Case(
        _other(Mamba.recurrent, layers=2, parts=((4, 4),), device=4),
        {"layers": MANY, "parts": These("[[8]]"), "device": ROOM, "host": OneOf(Integer(0), Depends(Text())),
         "dtype": Depends(Text()), "more": Flag()},
        names={"device": "device_states", "host": "host_states", "more": "replicated"},
    ),
    "asynccache.components_from": plain(
        components_from, {"config": These(), "device": ROOM, "host": OneOf(Integer(0), Depends(Text())),
                          "dtype": OneOf(These("None"), Depends(Text())), "tp": Depends(Integer(1))},
        config=SimpleNamespace(num_hidden_layers=2, num_attention_heads=2, hidden_size=16, dtype="float32"), device=64,
    ),
    "asynccache.load_config": Case(
        _one_setting, {"path": Depends(Text(optional=True)), "env": These("None", "{}"), "given": Integer(1, 65536)},
        names={"given": "page_size", "path": ""},
    ),
    "asynccache.Adapter": plain(
        Adapter, {"key": Text(), "lora_name": Text(optional=True), "lora_id": Integer(0, 2**63 - 1, optional=True)},
        key="a",
    ),
    # the cache
    "asynccache.AsyncCache": Case(
        _new_cache,
        {"config": Thing(), "device": Thing(optional=True), "storage": OneOf(Text(), Thing(optional=True)),
         "workers": Thing(optional=True), "on_event": Function(optional=True), "span": Function(optional=True),
         "debug": Flag(optional=True)},
    ),
    "asynccache.AsyncCache.lease": Case(
        _lease,
        {"tokens": Tokens(1), "new_tokens": Integer(0), "namespace": Namespace(), "prefetch": Thing(optional=True),
         "wait": Flag(), "timeout": Number(0, optional=True), "states": Integer(0, optional=True),
         "chunk": Integer(1, optional=True), "swa_chunk": Integer(1, optional=True), "shorter": Flag(),
         "shared_tokens": Integer(0, optional=True)},
        books=True,
    ),
    "asynccache.AsyncCache.match": of_cache("match", {"tokens": Tokens(), "namespace": Namespace()}),
    "asynccache.AsyncCache.explain": of_cache("explain", {"tokens": Tokens(), "namespace": Namespace()}),
    "asynccache.AsyncCache.prefetch": Case(_prefetch, {"tokens": Tokens(), "namespace": Namespace()}, books=True),
    "asynccache.AsyncCache.keep": Case(
        _keep, {"tokens": Tokens(), "ttl": Number(above=0), "namespace": Namespace()}, books=True
    ),
    "asynccache.AsyncCache.flush": of_cache("flush", {"timeout": Number(0, optional=True)}),
    "asynccache.AsyncCache.invalidate": of_cache("invalidate", {"namespace": Namespace()}),
    "asynccache.AsyncCache.aclose": Case(_aclose, {"timeout": Number(optional=True)}, books=True),
    "asynccache.AsyncCache.attach_storage": Case(
        _attach,
        {"storage": Depends(Text()), "options": These("None", "{}"), "name": Depends(Text(optional=True)),
         "position": Integer(0, 1, optional=True), "backfill": Flag()},
        books=True,
    ),
    "asynccache.AsyncCache.detach_storage": Case(
        _detach, {"name": Depends(Text(optional=True)), "timeout": Number(0, optional=True)}, books=True,
        names={"name": "store"},
    ),
    "asynccache.PrefetchHandle": plain(
        PrefetchHandle,
        {"prefetch": Thing(), "key": Unchecked("cache.prefetch has checked it"),
         "namespace": Unchecked("cache.prefetch has checked it")},
        key=b"", namespace=None,
    ),
    # a lease
    "asynccache.Lease.advance": of_lease(
        "advance", {"position": Integer(0, 20), "after": EVENT}, lambda world, lease: {"position": 8}
    ),
    "asynccache.Lease.truncate": of_lease(
        "truncate", {"length": OneOf(Integer(12), Depends(Integer(0, 11))), "after": EVENT},
        lambda world, lease: {"length": 12},
    ),
    "asynccache.Lease.adopt": of_lease("adopt", {"after": EVENT}),
    "asynccache.Lease.release": of_lease("release", {"after": EVENT, "ended": Flag()}),
    "asynccache.Lease.extend": of_lease(
        "extend", {"tokens": Integer(0), "states": Integer(0), "wait": Flag()}, lambda world, lease: {"tokens": 1}
    ),
    "asynccache.Lease.layer": of_lease("layer", {"i": Integer(0, LAYERS - 1)}, lambda world, lease: {"i": 0}),
    "asynccache.Lease.wait_layer": of_lease(
        "wait_layer", {"stream": Thing(), "i": Integer(0, LAYERS - 1)},
        lambda world, lease: {"stream": _Stream(), "i": 0},
    ),
    "asynccache.Lease.page_table": of_lease(
        "page_table", {"component": Text(("full", "swa"))}, lambda world, lease: {"component": "full"}
    ),
    "asynccache.Lease.commit": of_lease(
        "commit", {"tokens": Tokens(3 * PAGE + 1), "after": EVENT, "checkpoint": Thing(optional=True)}, _commits
    ),
    "asynccache.Lease.commit (checkpoint)": Case(_commit_position, {"position": Integer(8, 8)}, books=True),
    "asynccache.Lease.commit (state)": Case(_commit_slot, {"slot": Depends(Integer(0, 7))}, books=True),
    # the scheduler
    "asynccache_shim.Limits": plain(
        Limits, {"max_new_tokens": COUNT, "stop_tokens": These("[]", "[8]", "(8,)", "{8}"),
                 "max_time": Number(0, optional=True)}
    ),
    "asynccache_shim.SchedulerConfig": plain(
        SchedulerConfig, {"step_tokens": COUNT, "max_running": COUNT, "checkpoint_every": COUNT, "preempt": Flag(),
                   "load_attempts": COUNT},
    ),
    "asynccache_shim.Request": Case(
        _request,
        {"tokens": Depends(Tokens(1)), "limits": Thing(optional=True), "priority": Integer(), "namespace": Namespace(),
         "sampling": Thing(optional=True), "ended": Flag(), "publishes": Function(optional=True)},
    ),
    "asynccache_shim.Request.next_token": Case(_next_token, {"index": Integer(0)}),
    "asynccache_shim.Request (attributes)": Case(
        _late_attribute,
        {"tokens": Depends(Tokens(1)), "limits": Thing(), "priority": Integer(), "namespace": Namespace(),
         "sampling": Thing(), "ended": Flag(), "publishes": Function(optional=True)},
        books=True,
    ),
    "asynccache_shim.Sampling": plain(
        _drawn, {"temperature": SECONDS, "top_p": SHARE, "seed": Depends(Integer(optional=True)),
                 "top_k": Integer(0, MAX_TOKEN)}
    ),
    "asynccache_shim.Scheduler": Case(
        _scheduler,
        {"cache": Thing(), "model": Thing(), "settings": Thing(optional=True)},
        books=True,
    ),
    "asynccache_shim.Scheduler.submit": Case(_submit, {"request": Thing()}, books=True),
    "asynccache_shim.Scheduler.aclose": Case(_aclose_scheduler, {"error": These("None")}),
    "asynccache_shim.follow": Case(_follow, {"worker": Thing(), "model": Thing()}),
    # stores
    "asynccache.storage.StoreOptions": plain(
        StoreOptions, {"name": These("'8'", "np.str_('8')"), "write": Flag(), "promote": Flag(),
                       "timeout": Number(above=0), "concurrency": Integer(1, 65536), "slow": SECONDS},
    ),
    "asynccache.storage.ParsedUrl": plain(
        ParsedUrl, {"scheme": Text(), "path": Text(), "options": TEXTS}, scheme="memory"
    ),
    "asynccache.storage.Breaker": plain(
        Breaker, {"threshold": COUNT, "backoff": Number(above=0), "max_backoff": Number(above=0), "jitter": Function()}
    ),
    "asynccache.storage.CheckedStore": Case(
        _checked_store,
        {"backend": Thing(), "layout": Thing(), "timeout": Number(above=0), "slow": SECONDS,
         "concurrency": Integer(1, 65536), "breaker": Thing(optional=True), "clock": Function(optional=True),
         "threads": Integer(0, 1024)},
    ),
    "asynccache.storage.CheckedStore (layout)": Case(_layout_of_a_store, _FIELDS),
    "asynccache.storage.check_store (layout)": Case(_layout_checked, _FIELDS),
    "asynccache.storage.CheckedStore.register": Case(
        _register, {"pool": Text(), "memory": These("memoryview", "2-d memoryview")}
    ),
    "asynccache.storage.CheckedStore.scrub": Case(
        _scrub, {"rate": Number(above=0, optional=True), "tell": Function()}
    ),
    **{f"asynccache.storage.CheckedStore.{name}": of_store(name, {"keys": These("[]")}, keys=[PAGE_KEY])
       for name in ("delete", "exists")},
    "asynccache.storage.CheckedStore.hint": of_store(
        "hint", {"verb": Thing(), "keys": These("[]"), "seconds": SECONDS}, verb=Hint.KEEP, keys=[PAGE_KEY]
    ),
    **{f"asynccache.storage.CheckedStore.{name}": of_store(
        name, {"keys": Thing(), "payloads": Thing()}, keys=[PAGE_KEY], payloads=[memoryview(bytearray(64))])
       for name in ("get", "put")},
    "asynccache.storage.CheckedStore.is_away": of_store("is_away", {"key": Thing()}, key=PAGE_KEY),
    "asynccache.storage.Breaker.allow": of_breaker("allow", {"now": Number()}, "now"),
    "asynccache.storage.Breaker.success": of_breaker(
        "success", {"permit": Integer(0), "now": Number(optional=True), "kind": Text()}, "permit"
    ),
    "asynccache.storage.Breaker.failure": of_breaker(
        "failure", {"permit": Integer(0), "now": Number(), "kind": Text()}, "permit", "now"
    ),
    "asynccache.storage.Breaker.abandon": of_breaker("abandon", {"permit": Integer(0)}, "permit"),
    "asynccache.storage.Breaker.shut_for": of_breaker("shut_for", {"now": Number()}, "now"),
    "asynccache.storage.Pages": plain(
        Pages, {"serving": Thing(), "pools": Unchecked("made by Pages.open")}, pools={}
    ),
    "asynccache.storage.Pages.open": Case(
        _pages_open,
        {"storage": Depends(Text()), "memory": Thing(), "page_bytes": Depends(Integer(1)),
         "namespace": These("'8'", "np.str_('8')", "b'8'", "bytes of a token"), "options": These("None", "{}")},
    ),
    "asynccache.storage.Pages.exists": of_pages(
        "exists", {"keys": EMPTY, "pool": OF_ONE_POOL, "timeout": WITHIN}, keys=[b"a"]
    ),
    "asynccache.storage.Pages.hint": of_pages(
        "hint", {"verb": Thing(), "keys": EMPTY, "seconds": SECONDS, "pool": OF_ONE_POOL, "timeout": WITHIN},
        verb=Hint.KEEP, keys=[b"a"],
    ),
    "asynccache.storage.read_hints": plain(
        read_hints, {"envelope": Unchecked("whatever comes counts as malformed, at worst")}, envelope=None
    ),
    "asynccache.storage.RequestHints": plain(
        RequestHints, dict.fromkeys(
            ("prefetch", "block_hashes", "keep", "keep_end", "ended", "ended_start", "skip_store"),
            Unchecked("made by read_hints"),
        ),
    ),
    **{f"asynccache.storage.Pages.{name}": of_pages(
        name, {"keys": Thing(), "slots": SLOTS, "pool": OF_ONE_POOL, "timeout": WITHIN}, keys=[b"a"], slots=[0])
       for name in ("get", "put")},
    "asynccache.storage.Pages.clear": of_pages("clear", {"timeout": WITHIN}),
    "asynccache.storage.Pages.close": Case(_pages_close, {"timeout": Number(0)}),
    "asynccache.storage.ParsedUrl.allow_only": of_url(
        "allow_only", {"names": These("[]", "['8']", "{}", "{'a': 1}")}, names=()
    ),
    "asynccache.storage.ParsedUrl.settings": of_url(
        "settings", {"kind": Thing(), "own": Unchecked("settings of that kind, which checks them")}, kind=StoreOptions
    ),
    "asynccache.storage.ThreadPool.call": Case(
        _work, {"function": Function(), "args": Unchecked("the function's own"), "kwargs": Unchecked("the same")}
    ),
    "asynccache.storage.ThreadPool.submit": Case(
        _submitted, {"function": Function(), "args": Unchecked("the function's own"), "kwargs": Unchecked("the same")}
    ),
    "asynccache.storage.ThreadPool.run": Case(
        _run, {"function": Function(), "args": Unchecked("the function's own"), "kwargs": Unchecked("the same")}
    ),
    "asynccache.storage.ThreadPool.run_for": Case(
        _run_for, {"size": Integer(), "function": Function(), "args": Unchecked("the function's own"),
                   "kwargs": Unchecked("the same")},
    ),
    "asynccache.storage.ThreadPool.spread": Case(
        _spread, {"function": Function(), "sizes": Unchecked("summed for every call"),
                  "columns": Unchecked("the function's own")},
    ),
    "asynccache.storage.OpenCalls": plain(OpenCalls, {"name": Text()}, name="w"),
    "asynccache.storage.completed": Case(_completed, {"work": Thing()}),
    "asynccache.storage.completed_in_thread": Case(_completed_in_thread, {
        "function": Function(), "args": Unchecked("the function's own"), "kwargs": Unchecked("the same")
    }),
    "asynccache.storage.settled": Case(_settled, {"futures": These("[]")}),
    "asynccache.storage.check_stores": Case(
        _check_stores, {"urls": OneOf(These("[]"), Depends(These("['8']"))), "layout": Thing(),
                        "options": These("None", "{}")}, names={"urls": "storage"},
    ),
    "asynccache.storage.ThreadPool": plain(ThreadPool, {"count": Integer(0, 1024), "name": Text()}, count=1, name="w"),
    "asynccache.storage.backend_class": plain(backend_class, {"scheme": Depends(Text())}, scheme="memory"),
    "asynccache.storage.check_store": plain(
        check_store, {"url": Depends(Text()), "layout": Thing(), "options": These("None", "{}")},
        url="memory:", layout=LAYOUT,
    ),
    "asynccache.storage.parse_host_port": plain(
        parse_host_port, {"text": Text(), "default": Integer(1, 65535, optional=True)}, text="host:1"
    ),
    "asynccache.storage.open_store": plain(
        open_store,
        {"url": Depends(Text()), "layout": Thing(), "options": These("None", "{}"),
         "timeout": Number(above=0, optional=True)},
        url="memory:", layout=LAYOUT,
    ),
    "asynccache.storage.parse_size": plain(
        parse_size, {"name": Text(), "text": Depends(Text())}, name="size", text="8"
    )._replace(names={"text": "size"}),
    "asynccache.storage.parse_url": plain(
        parse_url, {"text": Depends(Text()), "options": These("None", "{}")}, text="memory:"
    ),
    "asynccache.storage.take_options": plain(take_options, {"url": Thing()}, url=ParsedUrl("memory")),
    "asynccache.storage.weights_digest": plain(
        weights_digest,
        {"model": Depends(Text()), "revision": Text(optional=True), "cache": Text(optional=True)}, model=WEIGHTS.name,
    ),
    # events
    "asynccache.events.ZmqPublisher": plain(
        ZmqPublisher,
        {"endpoint": Depends(Text()), "replay": Depends(Text(optional=True)), "topic": Text(),
         "rank": Integer(0, INT32, optional=True), "layout": Member(), "replay_topic": Flag(optional=True),
         "keep": Integer(1, 1 << 30), "keep_bytes": COUNT, "gather": Number(0, 60), "backlog": COUNT,
         "high_water": Integer(1, INT32), "clock": Function()},
        endpoint="inproc://edge", layout=EventLayout.MAP,
    ),
    "asynccache.events.ZmqPublisher.close": Case(_publisher_close, {"timeout": Number(0, threading.TIMEOUT_MAX)}),
    "asynccache.events.Subscriber": plain(
        Subscriber,
        {"endpoint": Depends(Text()), "replay": Depends(Text(optional=True)), "topic": Text(), "layout": Member(),
         "patience": Number(0, 1e6)},
        endpoint="inproc://edge",
    ),
    "asynccache.events.Subscriber.receive": Case(_receive, {"timeout": Number(0, 1e6)}),
    "asynccache.events.ZmqPublisher.__call__": Case(_notice, {"notice": Thing()}),
    "asynccache.events.Mirror.note": of_mirror("note", {"event": Thing()}, lambda event: event),
    "asynccache.events.Mirror.note (event)": of_mirror(
        "note", {"block_hashes": INTEGERS, "medium": Text(optional=True)}, _stored
    ),
    "asynccache.events.Mirror.apply": of_mirror("apply", {"batch": Thing()}, lambda batch: batch),
    "asynccache.events.Mirror.apply (batch)": of_mirror(
        "apply", {"events": These("[]")}, lambda events: EventBatch(0.0, events)
    ),
    "asynccache.events.Mirror.apply (event)": of_mirror(
        "apply", {"event": Thing()}, lambda event: EventBatch(0.0, [_stored(), event])
    ),
    "asynccache.events.Mirror.prefix": plain(
        Mirror().prefix, {"hashes": INTEGERS, "medium": Text(("GPU", "CPU"))}, hashes=[1]
    ),
    # metrics
    "asynccache.metrics.LoopLag": plain(LoopLag, {"tick": Number(above=0)}),
    "asynccache.metrics.CacheCollector": Case(
        _collector, {"cache": Thing(), "name": Text(optional=True), "lag": Thing(optional=True),
                     "publisher": Function(optional=True)},
    ),
    "asynccache.metrics.app": Case(
        _metrics_app, {"cache": Thing(), "registry": Thing(optional=True), "lag": Thing(optional=True)},
    ),
    "asynccache.metrics.start_metrics_server": Case(
        _metrics_server, {"cache": Thing(), "host": Text(("127.0.0.1",)), "port": Integer(0, 65535),
                          "registry": Thing(optional=True), "lag": Thing(optional=True)},
    ),
}  # fmt: skip

_VALUE = "a value: Mirror checks of an event what it takes up, and msgspec all of one that comes from the wire"

_GROUP = "a cache with workers only takes it: tests/group/test_group_edges.py calls it with all that is odd"

NOT_CALLED: dict[str, Unchecked] = {
    **{f"asynccache.DevicePool{name}": Unchecked("a cache makes its pools; tests/memory has what they refuse")
       for name in ("", ".allocate", ".layer", ".kv", ".states", ".block_table")},
    "asynccache.storage.ThreadPool.map": Unchecked("inherited as it is from concurrent.futures.Executor"),
    "asynccache.storage.ThreadPool.shutdown": Unchecked("as that of Executor: it looks at neither argument"),
    **{f"asynccache.AsyncCache.{name}": Unchecked(_GROUP) for name in ("send_batch", "batch_ended")},
    "asynccache.AsyncCache.block_table": Unchecked("of a pool with a shape: tests/runtime/test_looking_at_a_cache.py"),
    "asynccache.metrics.MetricsServer": Unchecked("start_metrics_server makes it"),
    "asynccache.Lease": Unchecked("AsyncCache.lease makes it, and takes all that it is made of"),
    **{f"asynccache.events.{name}": Unchecked(_VALUE) for name in ("BlockRemoved", "BlockStored", "EventBatch")},
}
