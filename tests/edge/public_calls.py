"""Every public function and method with parameters: how it is called, and what each of its parameters takes.

A parameter that is new must be entered here: a test compares these tables with the signatures.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any

from asynccache_shim import Limits, Request, Sampling, Scheduler, Settings, connect_orders

from asynccache import (
    Adapter,
    AsyncCache,
    CacheConfig,
    Full,
    HitPolicy,
    Mamba,
    PrefetchPolicy,
    Sidecar,
    SlidingWindow,
    WritePolicy,
    load_config,
)
from asynccache.events import Layout, Mirror, Subscriber, ZmqPublisher
from asynccache.metrics import CacheCollector, Exposed, LoopLag
from asynccache.storage import (
    Attached,
    Breaker,
    CheckedStore,
    ParsedUrl,
    StoreLayout,
    StoreOptions,
    TieredStore,
    Workers,
    backend_class,
    check_store,
    open_store,
    parse_place,
    parse_size,
    parse_url,
    pool_digest,
    take_options,
    weights_digest,
)
from asynccache.testing.simulated_backend import SimulatedBackend
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

Given = Mapping[str, Any]
Params = Mapping[str, Kind | Unchecked]

INT32 = 2**31 - 1
SHARE = Number(0, 1)
SECONDS = Number(0)
COUNT = Integer(1)
TEXTS = These("{}")
NAMES = {"url": "storage", "text": "storage", "scheme": "storage", "endpoint": "events", "replay": "events"}
EVENT = Thing(optional=True)


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
FULL = Full(bytes_per_token=16, device_tokens=1024, host_tokens=1024)
POOL: Params = {
    "layers": Depends(Integer(1, 65536)), "covers": OneOf(These("[]"), Depends(Tokens())), "dtype": Text(),
}  # fmt: skip
TOKENS: Params = {"bytes_per_token": Integer(0), "device_tokens": COUNT, "host_tokens": Integer(0)}

SETTINGS: Params = {
    "model": Depends(Text()), "components": These(), "sidecars": These("[]"),
    "page_size": Integer(1, 65536), "device": Text(), "storage": OneOf(Depends(Text()), These("None", "[]", "['8']")),
    "write_policy": Member(), "prefetch_policy": Member(), "eviction": Text(("lru",)),
    "prefetch_threshold": Integer(0), "prefetch_quota": SHARE, "backup_quota": SHARE,
    "prefetch_timeout_base": SECONDS, "prefetch_timeout_per_1k": SECONDS, "prefetch_timeout_max": Number(above=0),
    "load_back_threshold": Integer(0), "max_backup_ops": COUNT, "write_back_watermark": SHARE,
    "kept_fraction": SHARE, "close_deadline": Number(above=0), "freeze_gc": Flag(),
    "storage_options": TEXTS,
}  # fmt: skip


async def _config(world: World, given: Given) -> None:
    config = CacheConfig(**{"model": "m", "components": (FULL,), **given})
    (name,) = given
    value = getattr(config, name)
    assert type(value) in (int, float, bool, str, tuple, dict, type(None), WritePolicy, PrefetchPolicy)
    assert replace(config) == config


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


async def _attached(world: World, given: Given) -> None:
    store = CheckedStore(_backend(), LAYOUT, threads=0)
    await called(Attached, {"store": store, "options": StoreOptions()}, given)
    await store.aclose()


def of_tiers(method: str, params: Params) -> Case:
    """A method of a ``TieredStore`` that has one store."""

    async def call(world: World, given: Given) -> None:
        store = CheckedStore(_backend(), LAYOUT, threads=0)
        first, second = Attached(store, StoreOptions("first")), Attached(store, StoreOptions("second"))
        tiers = TieredStore(threads=0, room=1 << 16)
        tiers.attach(first)
        good = {"attached": first if method == "detach" else second, "options": StoreOptions("third"), "name": "first"}
        await called(getattr(tiers, method), {name: good[name] for name in params if name in good}, given)
        await store.aclose()

    return Case(call, params)


class _Listed(SimulatedBackend):
    """A store that can be read through, and has nothing."""

    def parts(self) -> list[Any]:
        return []

    async def scrub(self, part: Any, verify: Any) -> Any:
        raise NotImplementedError


async def _register(world: World, given: Given) -> None:
    store = CheckedStore(_backend(), LAYOUT, threads=0)
    await called(store.register, {"pool": "full", "memory": memoryview(bytearray(64))}, given)
    await store.aclose()


async def _scrub(world: World, given: Given) -> None:
    store = CheckedStore(_Listed(random.Random(0)), LAYOUT, threads=0)
    await called(store.scrub, {}, given)
    await store.aclose()


async def _publisher_close(world: World, given: Given) -> None:
    publisher = ZmqPublisher("inproc://edge-close")
    await called(publisher.close, {}, given)
    publisher.close()


async def _receive(world: World, given: Given) -> None:
    with Subscriber("inproc://edge-receive") as subscriber:
        received = await called(subscriber.receive, {"timeout": 0}, given)
        assert hasattr(received, "__next__")


async def _exposed(world: World, given: Given) -> None:
    await called(Exposed, {"cache": world.cache}, given)


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
        return [7 if work.sample else -1 for work in batch.works]


async def _scheduler(world: World, given: Given) -> None:
    await called(Scheduler, {"cache": world.cache, "model": _Model()}, given)


async def _submit(world: World, given: Given) -> None:
    async with Scheduler(world.cache, _Model()) as scheduler:
        await called(lambda request: scheduler.submit(request), {"request": Request(world.prompt())}, given)


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


class _Alone:
    """Ranks of which the others never come."""

    rank = 0

    class topology:
        ranks = 1

    def links(self, length: int) -> Any:
        raise NotImplementedError

    async def gather(self, content: bytes) -> Any:
        return [content]


async def _orders(world: World, given: Given) -> None:
    orders = await called(connect_orders, {"ranks": _Alone(), "host": "127.0.0.1"}, given)
    await orders.aclose(well=True)


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
        await world.cache.detach_storage(await world.cache.attach_storage(**arguments), drain=False)

    await called(and_detach, {"storage": "memory:", "name": "other"}, given)


async def _detach(world: World, given: Given) -> None:
    async def attached(**arguments: Any) -> None:
        if "other" not in world.cache.stores:
            await world.cache.attach_storage("memory:", name="other", backfill=False)
        await world.cache.detach_storage(**arguments)

    await called(attached, {"name": "other"}, given)
    if "other" in world.cache.stores:
        await world.cache.detach_storage("other", drain=False)


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


async def _commit_threadsafe(world: World, given: Given) -> None:
    async with world.lease() as lease:

        async def committed(**arguments: Any) -> None:
            await asyncio.wrap_future(lease.commit_threadsafe(**arguments))

        await called(committed, _commits(world, lease), given)


async def _release_threadsafe(world: World, given: Given) -> None:
    async with world.lease() as lease:
        await called(lease.release_threadsafe, {}, given)
        for _ in range(10):
            await asyncio.sleep(0)


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
        Mamba, {"state_bytes": COUNT, "device_states": COUNT, "host_states": Integer(0), **POOL}, state_bytes=64,
        device_states=4,
    ),
    "asynccache.Sidecar": plain(
        Sidecar,
        {"name": Depends(Text()), "indices_from": Text(), "bytes_per_page": COUNT, "hit_policy": Member(optional=True),
         "replicated": Flag(), **POOL},
        name="s", indices_from="full", bytes_per_page=64, hit_policy=HitPolicy.ALL_PAGES,
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
         "ranks": Thing(optional=True), "agreement": Thing(optional=True), "on_event": Function(optional=True)},
    ),
    "asynccache.AsyncCache.lease": Case(
        _lease,
        {"tokens": Tokens(1), "new_tokens": Integer(0), "extra_key": Namespace(), "prefetch": Thing(optional=True),
         "wait": Flag(), "timeout": Number(0, optional=True), "states": Integer(0, optional=True),
         "chunk": Integer(1, optional=True), "swa_chunk": Integer(1, optional=True), "shorter": Flag()},
        books=True,
    ),
    "asynccache.AsyncCache.match": of_cache("match", {"tokens": Tokens(), "extra_key": Namespace()}),
    "asynccache.AsyncCache.explain": of_cache("explain", {"tokens": Tokens(), "extra_key": Namespace()}),
    "asynccache.AsyncCache.prefetch": Case(_prefetch, {"tokens": Tokens(), "extra_key": Namespace()}, books=True),
    "asynccache.AsyncCache.keep": Case(
        _keep, {"tokens": Tokens(), "ttl": Number(above=0), "extra_key": Namespace()}, books=True
    ),
    "asynccache.AsyncCache.flush": of_cache("flush", {"timeout": Number(0, optional=True)}),
    "asynccache.AsyncCache.invalidate": of_cache("invalidate", {"extra_key": Namespace()}),
    "asynccache.AsyncCache.aclose": Case(_aclose, {"deadline": Number(optional=True)}, books=True),
    "asynccache.AsyncCache.attach_storage": Case(
        _attach,
        {"storage": Depends(Text()), "options": These("None", "{}"), "name": Depends(Text(optional=True)),
         "position": Integer(0, 1, optional=True), "backfill": Flag()},
        books=True,
    ),
    "asynccache.AsyncCache.detach_storage": Case(
        _detach, {"name": Depends(Text(optional=True)), "drain": OneOf(Flag(), Number(0))}, books=True,
        names={"name": "store"},
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
    "asynccache.Lease.release_threadsafe": Case(_release_threadsafe, {"after": EVENT, "ended": Flag()}, books=True),
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
        "commit", {"tokens": Tokens(3 * PAGE + 1), "ready": EVENT, "checkpoint": Thing(optional=True)}, _commits
    ),
    "asynccache.Lease.commit (checkpoint)": Case(_commit_position, {"position": Integer(8, 8)}, books=True),
    "asynccache.Lease.commit (state)": Case(_commit_slot, {"slot": Depends(Integer(0, 7))}, books=True),
    "asynccache.Lease.commit_threadsafe": Case(
        _commit_threadsafe, {"tokens": Tokens(3 * PAGE + 1), "ready": EVENT, "checkpoint": Thing(optional=True)},
        books=True,
    ),
    # the scheduler
    "asynccache_shim.Limits": plain(
        Limits, {"max_new_tokens": COUNT, "stop_tokens": These("[]", "[8]", "(8,)", "{8}")}
    ),
    "asynccache_shim.Settings": plain(
        Settings, {"step_tokens": COUNT, "max_running": COUNT, "checkpoint_every": COUNT, "preempt": Flag(),
                   "load_attempts": COUNT},
    ),
    "asynccache_shim.Request": Case(
        _request,
        {"tokens": Depends(Tokens(1)), "limits": Thing(optional=True), "priority": Integer(), "extra_key": Namespace(),
         "sampling": Thing(optional=True), "ended": Flag()},
    ),
    "asynccache_shim.Request.next_token": Case(_next_token, {"index": Integer(0)}),
    "asynccache_shim.Request (attributes)": Case(
        _late_attribute,
        {"tokens": Depends(Tokens(1)), "limits": Thing(), "priority": Integer(), "extra_key": Namespace(),
         "sampling": Thing(), "ended": Flag()},
        books=True,
    ),
    "asynccache_shim.Sampling": plain(
        _drawn, {"temperature": SECONDS, "top_p": SHARE, "seed": Depends(Integer(optional=True))}
    ),
    "asynccache_shim.Scheduler": Case(
        _scheduler,
        {"cache": Thing(), "model": Thing(), "settings": Thing(optional=True), "orders": Thing(optional=True)},
        books=True,
    ),
    "asynccache_shim.Scheduler.submit": Case(_submit, {"request": Thing()}, books=True),
    "asynccache_shim.connect_orders": Case(
        _orders, {"ranks": Thing(), "host": Depends(Text()), "timeout": Number(above=0)}
    ),
    # stores
    "asynccache.storage.StoreOptions": plain(
        StoreOptions, {"name": Text(), "write": Flag(), "promote": Flag(), "timeout": Number(above=0),
                       "concurrency": Integer(1, 65536), "slow": SECONDS},
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
         "threads": Integer(0, 1024), "headers": Integer(1, 1 << 24)},
    ),
    "asynccache.storage.CheckedStore.register": Case(
        _register, {"pool": Text(), "memory": These("memoryview", "2-d memoryview")}
    ),
    "asynccache.storage.CheckedStore.scrub": Case(
        _scrub, {"rate": Number(above=0, optional=True), "tell": Function()}
    ),
    "asynccache.storage.Attached": Case(_attached, {"store": Thing(), "options": Thing(), "owned": Flag()}),
    "asynccache.storage.TieredStore": plain(
        TieredStore, {"threads": Integer(0, 1024), "room": Integer(1, 1 << 40)}, threads=0, room=1 << 16
    ),
    "asynccache.storage.TieredStore.find": of_tiers("find", {"name": Depends(Text(optional=True))})._replace(
        names={"name": "store"}
    ),
    "asynccache.storage.TieredStore.check": of_tiers(
        "check", {"options": Thing(), "position": Integer(0, 1, optional=True)}
    ),
    "asynccache.storage.TieredStore.attach": of_tiers(
        "attach", {"attached": Thing(), "position": Integer(0, 1, optional=True)}
    ),
    "asynccache.storage.TieredStore.detach": of_tiers("detach", {"attached": Thing()}),
    "asynccache.storage.Workers": plain(Workers, {"count": Integer(1, 1024), "name": Text()}, count=1, name="w"),
    "asynccache.storage.backend_class": plain(backend_class, {"scheme": Depends(Text())}, scheme="memory"),
    "asynccache.storage.check_store": plain(
        check_store, {"url": Depends(Text()), "layout": Thing(), "options": These("None", "{}")},
        url="memory:", layout=LAYOUT,
    ),
    "asynccache.storage.parse_place": plain(parse_place, {"text": Text()}, text="host:1"),
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
    "asynccache.storage.pool_digest": plain(
        pool_digest, {"spec": Thing(), "page_size": COUNT, "layout": Text(), "shard": Text(optional=True)},
        spec=CacheConfig(model="m", components=(FULL,)).pools()[0], page_size=16,
    ),
    # events
    "asynccache.events.ZmqPublisher": plain(
        ZmqPublisher,
        {"endpoint": Depends(Text()), "replay": Depends(Text(optional=True)), "topic": Text(),
         "rank": Integer(0, INT32, optional=True), "layout": Member(), "replay_topic": Flag(optional=True),
         "keep": Integer(1, 1 << 30), "keep_bytes": COUNT, "gather": Number(0, 60), "backlog": COUNT,
         "high_water": Integer(1, INT32), "clock": Function()},
        endpoint="inproc://edge", layout=Layout.MAP,
    ),
    "asynccache.events.ZmqPublisher.close": Case(_publisher_close, {"timeout": Number(0, threading.TIMEOUT_MAX)}),
    "asynccache.events.Subscriber": plain(
        Subscriber,
        {"endpoint": Depends(Text()), "replay": Depends(Text(optional=True)), "topic": Text(), "layout": Member(),
         "patience": Number(0, 1e6)},
        endpoint="inproc://edge",
    ),
    "asynccache.events.Subscriber.receive": Case(_receive, {"timeout": Number(0, 1e6)}),
    "asynccache.events.Mirror.prefix": plain(
        Mirror().prefix, {"hashes": Unchecked("a list of hashes that is only read"), "medium": Text(("GPU", "CPU"))},
        hashes=[1],
    ),
    # metrics
    "asynccache.metrics.LoopLag": plain(LoopLag, {"tick": Number(above=0)}),
    "asynccache.metrics.CacheCollector": Case(
        _collector, {"cache": Thing(), "name": Text(optional=True), "lag": Thing(optional=True),
                     "publisher": Function(optional=True)},
    ),
    "asynccache.metrics.Exposed": Case(
        _exposed, {"cache": Thing(), "host": Text(), "port": Integer(0, 65535), "registry": Thing(optional=True),
                   "lag": Thing(optional=True)},
    ),
}  # fmt: skip

_OWN = "the library's own parts call it, with what they made"
_KEYS = "keys and buffers of pages, which only the runtime makes: the tests of stores show what becomes of them"
_VALUES = "a value that is read from the wire"

_PAGES = "see tests/storage/test_pages_arguments.py"

NOT_CALLED: dict[str, Unchecked] = {
    "asynccache.storage.Pages": Unchecked("Pages.open makes it"),
    **{f"asynccache.storage.Pages.{name}": Unchecked(_PAGES)
       for name in ("clear", "close", "exists", "get", "open", "put")},
    **{f"asynccache.storage.{name}": Unchecked("AsyncCache and Pages call it")
       for name in ("close_unattached", "open_all", "open_attached", "options_of")},
    "asynccache.storage.check_stores": Unchecked("it returns what is wrong: see tests/stores/test_checked_urls.py"),
    "asynccache.storage.no_store": Unchecked("it makes an error's text"),
    "asynccache.Lease": Unchecked("AsyncCache.lease makes it"),
    "asynccache.PrefetchHandle": Unchecked("AsyncCache.prefetch makes it"),
    **{f"asynccache.PrefetchHandle.{name}": Unchecked(_OWN)
       for name in ("belongs_to", "fail", "finish", "let_go", "reach", "skip", "tell")},
    **{f"asynccache_shim.Request.{name}": Unchecked("for the scheduler")
       for name in ("end", "put", "sent", "submitted")},
    **{f"asynccache.storage.Attached.{name}": Unchecked(_OWN) for name in ("act", "ask", "put")},
    **{f"asynccache.storage.Breaker.{name}": Unchecked(_OWN)
       for name in ("abandon", "allow", "failure", "shut_for", "success")},
    **{f"asynccache.storage.{cls}.{name}": Unchecked(_KEYS)
       for cls in ("CheckedStore", "TieredStore") for name in ("delete", "exists", "get", "is_away", "put")},
    **{f"asynccache.storage.TieredStore.{name}": Unchecked(_OWN) for name in ("aclose_detached", "introduce")},
    **{f"asynccache.storage.ParsedUrl.{name}": Unchecked("backends call it")
       for name in ("permissions", "allow_only", "choice", "size")},
    "asynccache.storage.Reporting": Unchecked(_OWN),
    **{f"asynccache.storage.Reporting.{name}": Unchecked(_KEYS) for name in ("delete", "exists", "get", "put")},
    "asynccache.storage.Workers.call": Unchecked(_OWN),
    **{f"asynccache.storage.{name}": Unchecked(_KEYS)
       for name in ("completed", "header_of", "seal", "settled", "storage_key", "store_layout", "verify", "watch")},
    **{f"asynccache.events.{name}": Unchecked(_VALUES) for name in ("BlockRemoved", "BlockStored", "EventBatch")},
    "asynccache.events.Announcer.announce": Unchecked(_OWN),
    **{f"asynccache.events.Mirror.{name}": Unchecked(_VALUES) for name in ("apply", "note")},
}  # fmt: skip
