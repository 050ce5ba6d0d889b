"""Every public function and method with parameters: how it is called, and what each of its parameters takes.

What a parameter takes follows from its annotation (``kind_of``), unless ``EXCEPTIONS`` says more: which numbers, which
texts, which objects besides. A call that is new is entered there; a test compares these tables with the signatures.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import random
import re
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from operator import attrgetter
from tempfile import NamedTemporaryFile
from types import MappingProxyType, SimpleNamespace
from typing import Any

from asynccache_backends.memory import MemoryBackend
from asynccache_shim import Limits, Request, Sampling, Scheduler, follow
from asynccache_shim.request import MAX_TOKEN
from msgspec.structs import replace

from asynccache import (
    AsyncCache,
    CacheConfig,
    ConfigError,
    Full,
    HitPolicy,
    Mamba,
    PrefetchPolicy,
    SlidingWindow,
    WritePolicy,
    events,
    load_config,
    storage,
)
from asynccache.core.plan import Cleared
from asynccache.metrics import CacheCollector, app, start_metrics_server
from asynccache.worker import RankWorker, Topology
from asynccache.worker.local import EmbedderParts as NothingGiven
from asynccache.worker.rank_server import RankServer
from tests.edge.edge_kit import (
    PACKAGES,
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
    result_of,
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
SLOTS = Depends(Tokens(1))
NAMES = {"url": "storage", "text": "storage", "scheme": "storage", "endpoint": "events", "replay": "events"}
_KINDS: Mapping[str, Callable[[bool], Kind]] = {
    "bool": lambda optional: Flag(optional=optional), "str": lambda optional: Text(optional=optional),
    "Namespace": lambda optional: Namespace(),
}  # fmt: skip
INTEGERS = These("[]", "[8]", "(8,)", "[-8]", "[2**31]")
BY_NAME: Mapping[str, Kind] = {
    "options": These("None", "{}"), "after": Thing(optional=True), "now": Number(), "permit": Integer(0),
    "endpoint": Depends(Text()), "replay": Depends(Text(optional=True)), "pool": These("None"), "hashes": INTEGERS,
    "layout": Thing(),
}  # fmt: skip
"""What parameters of these names take, unless ``EXCEPTIONS`` says more."""
EMPTY = These("[]", "{}", "''", "b''")


# plain functions and classes


def plain(
    params: Params, *, via: Callable[..., Any] | None = None, told: Mapping[str, str] = NAMES, **good: Any
) -> Callable[[Any], Case]:
    """A function without a cache, which is that of the entry's name unless ``via`` is. ``told``: what errors call a
    parameter. What the function makes is closed."""

    def case(named: Any) -> Case:
        async def call(world: World, given: Given) -> None:
            made = await result_of((via or named)(**{**good, **given}))
            if isinstance(made, (events.ZmqPublisher, events.Subscriber)):
                made.close()
            if isinstance(made, storage.CheckedStore):
                await made.aclose()

        return Case(call, params, names=told)

    return case


WEIGHTS = NamedTemporaryFile(suffix=".bin")  # noqa: SIM115  # it is there as long as this module
MANY = Integer(1, 65536)
STATES = OneOf(Integer(0), Depends(Text()))
ROOM = OneOf(Integer(1), Depends(Text()))
FULL = Full(bytes_per_token=16, device_tokens=1024, host_tokens=1024)
POOL: Params = {"layers": Depends(MANY), "covers": OneOf(These("[]"), Depends(Tokens())), "replicated": Flag()}
TOKENS: Params = {
    "bytes_per_token": Integer(0), "device_tokens": OneOf(COUNT, Depends(Text())), "host_tokens": STATES,
    "kv_heads": These("0"), "head_dim": These("0"),
}  # fmt: skip

SETTINGS: Params = {
    "model": Depends(Text()), "components": These(), "sidecars": These("[]"), "page_size": MANY,
    "storage": OneOf(Depends(Text()), These("None", "[]", "['8']")), "eviction": Text(("lru", "p2c")),
    "prefetch_threshold": Integer(0), "prefetch_quota": SHARE, "backup_quota": SHARE,
    "prefetch_timeout_base": SECONDS, "prefetch_timeout_per_1k": SECONDS, "prefetch_timeout_max": Number(above=0),
    "load_back_threshold": Integer(0), "max_backup_ops": COUNT, "write_back_watermark": SHARE,
    "kept_fraction": SHARE, "close_timeout": Number(above=0), "storage_options": TEXTS,
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


# calls that are made again with good arguments when one was refused


def within(
    opened: Callable[[World], Any], method: str | Callable[[World, Any], Callable[..., Any]], params: Params,
    good: Given | Callable[[World, Any], Given] = MappingProxyType({}), *, books: bool = False,
    names: Mapping[str, str] = MappingProxyType({}),
) -> Case:  # fmt: skip
    """A method of what the context ``opened(world)`` gives, or what ``method(world, it)`` makes of it. ``good``: good
    arguments, or what makes them of both."""

    async def call(world: World, given: Given) -> None:
        async with AsyncExitStack() as stack:
            context = opened(world)
            enter = stack.enter_async_context if hasattr(context, "__aenter__") else stack.enter_context
            made = await result_of(enter(context))
            function = getattr(made, method) if isinstance(method, str) else method(world, made)
            await called(function, good(world, made) if callable(good) else good, given)

    return Case(call, params, books, names)


def function(
    call: Callable[..., Any], params: Params, good: Given | Callable[[World, Any], Given], **more: Any
) -> Case:
    """The same of a function."""
    return within(lambda world: nullcontext(call), "__call__", params, good, **more)


def _backend() -> SimulatedBackend:
    return SimulatedBackend(random.Random(0))


class _Listed(SimulatedBackend):
    """A store that can be read through, and has nothing."""

    def parts(self) -> list[Any]:
        return []

    async def scrub(self, part: Any, verify: Any) -> Any:
        raise NotImplementedError


LAYOUT = storage.StoreLayout({"full": 64}, b"schema")
PAGE_KEY = storage.PageKey("full", bytes(storage.KEY_BYTES))
_FIELDS: Params = {
    "page_bytes": These("{}", "{'a': 1}"), "schema": These("b'8'", "b''", "bytes of a token"),
}  # fmt: skip


def _layout(**fields: Any) -> storage.StoreLayout:
    return storage.StoreLayout(**{"page_bytes": {"full": 64}, "schema": b"schema", **fields})


def _store(**given: Any) -> storage.CheckedStore:
    return storage.CheckedStore(**{"backend": _backend(), "layout": LAYOUT, "threads": 0, **given})


@asynccontextmanager
async def _listed(world: World) -> AsyncIterator[storage.CheckedStore]:
    store = _store(backend=_Listed(random.Random(0)))
    yield store
    await store.aclose()


@asynccontextmanager
async def _serving(world: World) -> AsyncIterator[storage.CheckedStore]:
    """A store, which serves a page afterwards."""
    store = _store(backend=MemoryBackend())
    try:
        yield store
    finally:
        page, back = memoryview(bytearray(b"x" * 64)), memoryview(bytearray(64))
        key = [storage.PageKey("full", b"y" * storage.KEY_BYTES)]
        assert await store.put(key, [page]) == await store.get(key, [back]) == [storage.Result.HIT]
        assert back == page
        await store.aclose()


def of_store(method: str, params: Params, **good: Any) -> Case:
    return within(_serving, method, params, good)


async def _check_stores(world: World, given: Given) -> None:
    """What is wrong with the URLs is returned: the first of it is raised here."""
    for error in storage.check_stores(**{"urls": ["memory:"], "layout": LAYOUT, **given}):
        raise error


def of_breaker(method: str, params: Params, *good: str) -> Case:
    def arguments(world: World, breaker: Any) -> Given:
        every = {"permit": breaker.allow(0.0), "now": 0.0}
        return {name: every[name] for name in good}

    return within(lambda world: nullcontext(storage.Breaker(1)), method, params, arguments)


def of_url(method: str, params: Params, **good: Any) -> Case:
    return plain(params, via=getattr(storage.ParsedUrl("memory", options={}), method), **good)(None)


def _pages(world: World) -> storage.Pages:
    memory = world.once("memory", lambda: nullcontext(bytearray(6)))
    made: storage.Pages = world.once("pages", lambda: storage.Pages.open(MemoryBackend(), memory, 2, "m"))
    return made


@contextmanager
def _serving_pages(world: World) -> Iterator[storage.Pages]:
    """Pages, which serve one afterwards."""
    pages, memory = _pages(world), world.once("memory", nullcontext)
    memory[:2] = secrets.token_bytes(2)
    try:
        yield pages
    finally:
        assert pages.stats()["calls_in_flight"] == 0
        key = [bytes(memory[:2])]
        assert pages.put(key, [0]).result(60) == [storage.Result.HIT]
        assert pages.get(key, [2]).result(60) == [storage.Result.HIT]
        assert memory[:2] == memory[4:]


def of_pages(method: str, params: Params, **good: Any) -> Case:
    return within(
        _serving_pages, lambda world, pages: lambda **given: getattr(pages, method)(**given).result(60), params, good
    )


OWN: Params = {name: Unchecked("the function's own") for name in ("args", "kwargs")}
EIGHT: Given = {"function": lambda *_: 8}


def _threads(world: World) -> Any:
    return closing(storage.ThreadPool(1, "edge"))


def _done(world: World, made: Any) -> Given:
    done = asyncio.get_running_loop().create_future()
    done.set_result(8)
    return {"futures": [done]}


def _stored(**fields: Any) -> events.BlockStored:
    return events.BlockStored(**{
        "block_hashes": [8], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2, "lora_id": None,
        "medium": "GPU", "lora_name": None, **fields,
    })  # fmt: skip


def of_mirror(method: str, params: Params, make: Callable[..., Any]) -> Case:
    """A method of a ``Mirror``, which knows of nothing that was refused."""

    async def call(world: World, given: Given) -> None:
        mirror = events.Mirror()
        try:
            getattr(mirror, method)(make(**given))
        except ConfigError:
            assert not any(mirror.blocks.values())
            raise

    return Case(call, params)


@contextmanager
def _publisher(world: World) -> Iterator[events.ZmqPublisher]:
    with events.ZmqPublisher("inproc://edge-notice") as publisher:
        yield publisher
    assert publisher.error is None


def _received(world: World, subscriber: events.Subscriber) -> Callable[..., Any]:
    def call(**given: Any) -> None:
        assert hasattr(subscriber.receive(**given), "__next__")

    return call


async def _served(world: World, given: Given) -> None:
    async with await start_metrics_server(**{"cache": world.cache, **given}):
        pass


async def _fleet(world: World, given: Given) -> None:
    async def made(**arguments: Any) -> None:
        events.Fleet(**arguments).close()

    await called(made, {}, given)


def of_fleet(method: str, params: Params, **good: Any) -> Case:
    """A method of a ``Fleet``, which follows nothing that was refused."""

    async def call(world: World, given: Given) -> None:
        with events.Fleet() as fleet:
            fleet.add("there", [])
            try:
                await called(getattr(fleet, method), good, given)
            except ConfigError:
                assert set(fleet.stats()) <= {"there", "a"}
                raise

    return Case(call, params)


async def _followed(world: World, given: Given) -> None:
    """A stream, or one of such fields."""
    fields = {"endpoint": "inproc://edge-fleet", **given}
    with events.Fleet() as fleet:
        fleet.add("a", [fields["stream"] if "stream" in fields else events.EventStream(**fields)])


def _cache(world: World, made: Any) -> Given:
    return {"cache": world.cache}


def _drawn(**fields: Any) -> Request:
    return Request([1, 2, 3], sampling=Sampling(**fields))


def _aborted(world: World) -> Any:
    request = Request([1, 2, 3])
    request.abort()
    return nullcontext(request)


class _Model:
    def forward(self, batch: Any) -> list[int]:
        return [7 if chunk.sample else -1 for chunk in batch.chunks]


def _scheduler(world: World) -> Scheduler:
    return Scheduler(world.cache, _Model())


def _late(world: World, scheduler: Scheduler) -> Callable[..., None]:
    """A request's attributes may be set until it is submitted: they are looked at then."""

    def submit(**attributes: Any) -> None:
        request = Request(world.prompt(), Limits(1))
        for name, value in attributes.items():
            setattr(request, name, value)
        scheduler.submit(request)
        request.abort()

    return submit


def _closed_worker(world: World, made: Any) -> Given:
    server = RankServer(1, Topology(tp=2), NothingGiven(), None, lambda _: None)
    server.batches.finish(None)  # the cache is closed
    return {"worker": RankWorker(server), "model": _Model()}


# the cache


def of_cache(
    method: str | Callable[[World, AsyncCache], Callable[..., Any]], params: Params, prompt: int = 0,
    names: Mapping[str, str] = MappingProxyType({}), **good: Any,
) -> Case:  # fmt: skip
    def arguments(world: World, cache: AsyncCache) -> Given:
        return {"tokens": world.prompt(prompt), **good} if "tokens" in params else good

    return within(lambda world: nullcontext(world.cache), method, params, arguments, books=True, names=names)


def _through(world: World, cache: AsyncCache) -> Callable[..., Any]:
    async def entered(**terms: Any) -> None:
        async with cache.lease(**terms) as lease:
            await lease.loaded()

    return entered


def _kept(world: World, cache: AsyncCache) -> Callable[..., Any]:
    async def kept(**arguments: Any) -> None:
        (await cache.keep(**arguments)).release()

    return kept


async def _aclose(world: World, given: Given) -> None:
    cache = world.cache
    try:
        await cache.aclose(**given)
    finally:
        if cache.closed is not None:
            await world.reopen()


def _attached(world: World, cache: AsyncCache) -> Callable[..., Any]:
    async def and_detached(**arguments: Any) -> None:
        await cache.detach_storage(await cache.attach_storage(**arguments), timeout=0)

    return and_detached


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
    method: str | Callable[[World, Any], Callable[..., Any]], params: Params,
    good: Given | Callable[[World, Any], Given] = MappingProxyType({}),
) -> Case:  # fmt: skip
    return within(World.lease, method, params, good, books=True)


def _commits(world: World, lease: Any) -> dict[str, Any]:
    prompt = world.prompt()
    return {"tokens": prompt, "checkpoint": (len(prompt) // PAGE * PAGE, lease.states[1])}


def _checkpoint(world: World, lease: Any) -> Callable[..., Any]:
    """A commit whose checkpoint's parts are arguments."""
    position, slot = _commits(world, lease)["checkpoint"]
    return lambda position=position, slot=slot: lease.commit(world.prompt(), checkpoint=(position, slot))


class _Stream:
    name = "engine"

    def record(self) -> Any:
        raise NotImplementedError

    def wait_event(self, event: Any) -> None:
        pass


EXCEPTIONS: dict[str, Case | Callable[[Any], Case]] = {
    # the configuration
    "asynccache.CacheConfig": Case(_config, SETTINGS),
    "asynccache.Full": plain({**TOKENS, **POOL}, bytes_per_token=16, device_tokens=64),
    "asynccache.SlidingWindow": plain({"window": COUNT, **TOKENS, **POOL}, window=8, bytes_per_token=16,
        device_tokens=64),
    "asynccache.Mamba": plain({"state_bytes": COUNT, "device_states": ROOM, "host_states": STATES,
        "parts": These("[]"), **POOL}, state_bytes=64, device_states=4),
    "asynccache.Sidecar": plain({"name": Depends(Text()), "bytes_per_page": COUNT, **POOL}, name="s",
        indices_from="full", bytes_per_page=64, hit_policy=HitPolicy.ALL_PAGES),
    **{f"asynccache.{cls.__name__}.attention": Case(_other(cls.attention, layers=2, kv_heads=2, head_dim=8,
        device=64, **more), {"layers": MANY, "kv_heads": MANY, "head_dim": MANY, "device": ROOM, "host": STATES,
        "dtype": Depends(Text()), "more": Flag()}, names={"device": "device_tokens", "host": "host_tokens",
        "more": "replicated"}) for cls, more in ((Full, {}), (SlidingWindow, {"window": 8}))},
    "asynccache.Mamba.recurrent": Case(_other(Mamba.recurrent, layers=2, parts=((4, 4),), device=4), {"layers": MANY,
        "parts": These("[[8]]"), "device": ROOM, "host": STATES, "dtype": Depends(Text()), "more": Flag()},
        names={"device": "device_states", "host": "host_states", "more": "replicated"}),
    "asynccache.components_from": plain({"device": ROOM, "host": STATES, "tp": Depends(Integer(1)), "dtype":
        OneOf(These("None"), Depends(Text()))}, config=SimpleNamespace(num_hidden_layers=2, num_attention_heads=2,
        hidden_size=16, dtype="float32"), device=64),
    "asynccache.load_config": Case(_one_setting, {"path": Depends(Text(optional=True)), "env": These("None", "{}"),
        "given": MANY}, names={"given": "page_size", "path": ""}),
    "asynccache.Adapter": plain({"lora_id": Integer(0, 2**63 - 1, optional=True)}, key="a"),
    # the cache
    "asynccache.AsyncCache": function(AsyncCache, {"storage": OneOf(Text(), Thing(optional=True)), "on_event":
        Function(optional=True), "span": Function(optional=True)}, lambda world, _: {"config":
        world.cache.config})._replace(books=False),
    "asynccache.AsyncCache.lease": of_cache(_through, {"tokens": Tokens(1), "new_tokens": Integer(0),
        "timeout": Number(0, optional=True), "states": Integer(0, optional=True), "chunk": Integer(1, optional=True),
        "swa_chunk": Integer(1, optional=True), "shared_tokens": Integer(0, optional=True)}),
    "asynccache.AsyncCache.match": of_cache("match", {"tokens": Tokens()}),
    "asynccache.AsyncCache.explain": of_cache("explain", {"tokens": Tokens()}),
    "asynccache.AsyncCache.prefetch": of_cache("prefetch", {"tokens": Tokens()}, 1),
    "asynccache.AsyncCache.keep": of_cache(_kept, {"tokens": Tokens(), "ttl": Number(above=0)}, 1),
    "asynccache.AsyncCache.flush": of_cache("flush", {"timeout": Number(0, optional=True)}),
    "asynccache.AsyncCache.invalidate": of_cache("invalidate", {}),
    "asynccache.AsyncCache.aclose": Case(_aclose, {"timeout": Number(optional=True)}, books=True),
    "asynccache.AsyncCache.attach_storage": of_cache(_attached, {"storage": Depends(Text()), "name":
        Depends(Text(optional=True)), "position": Integer(0, 1, optional=True)}, storage=MemoryBackend(),
        name="other"),
    "asynccache.AsyncCache.detach_storage": Case(_detach, {"name": Depends(Text(optional=True)), "timeout": Number(0,
        optional=True)}, books=True, names={"name": "store"}),
    "asynccache.PrefetchHandle": plain({name: Unchecked("cache.prefetch has checked it") for name in ("key",
        "namespace")}, key=b"", namespace=None),
    # a lease
    "asynccache.Lease.advance": of_lease("advance", {"position": Integer(0, 20)}, {"position": 8}),
    "asynccache.Lease.truncate": of_lease("truncate", {"length": OneOf(Integer(12), Depends(Integer(0, 11)))},
        {"length": 12}),
    "asynccache.Lease.adopt": of_lease("adopt", {}),
    "asynccache.Lease.release": of_lease("release", {}),
    "asynccache.Lease.extend": of_lease("extend", {"tokens": Integer(0), "states": Integer(0)}, {"tokens": 1}),
    "asynccache.Lease.layer": of_lease("layer", {"i": Integer(0, LAYERS - 1)}, {"i": 0}),
    "asynccache.Lease.wait_layer": of_lease("wait_layer", {"stream": Thing(), "i": Integer(0, LAYERS - 1)},
        {"stream": _Stream(), "i": 0}),
    "asynccache.Lease.page_table": of_lease("page_table", {"component": Text(("full", "swa"))}, {"component": "full"}),
    "asynccache.Lease.commit": of_lease("commit", {"tokens": Tokens(3 * PAGE + 1),
        "checkpoint": Thing(optional=True)}, _commits),
    "asynccache.Lease.commit (checkpoint)": of_lease(_checkpoint, {"position": Integer(8, 8)}),
    "asynccache.Lease.commit (state)": of_lease(_checkpoint, {"slot": Depends(Integer(0, 7))}),
    # the scheduler
    "asynccache_shim.Limits": plain({"max_new_tokens": COUNT, "stop_tokens": These("[]", "[8]", "(8,)", "{8}"),
        "max_time": Number(0, optional=True)}),
    "asynccache_shim.SchedulerConfig": plain({"step_tokens": COUNT, "max_running": COUNT, "checkpoint_every": COUNT,
        "load_attempts": COUNT}),
    "asynccache_shim.Request": function(Request, {"tokens": Depends(Tokens(1)), "priority": Integer()},
        {"tokens": [1, 2, 3]}),
    "asynccache_shim.Request.next_token": within(_aborted, "next_token", {"index": Integer(0)}, {"index": 0}),
    "asynccache_shim.Request (attributes)": within(_scheduler, _late, {"tokens": Depends(Tokens(1)),
        "limits": Thing(), "priority": Integer(), "namespace": Namespace(), "sampling": Thing(), "ended": Flag(),
        "publishes": Function(optional=True)}, books=True),
    "asynccache_shim.Sampling": plain({"temperature": SECONDS, "top_p": SHARE,
        "seed": Depends(Integer(optional=True)), "top_k": Integer(0, MAX_TOKEN)}, via=_drawn),
    "asynccache_shim.Scheduler": function(Scheduler, {}, lambda world, _: {"cache": world.cache, "model": _Model()},
        books=True),
    "asynccache_shim.Scheduler.submit": within(_scheduler, "submit", {}, lambda world,
        _: {"request": Request(world.prompt())}, books=True),
    "asynccache_shim.Scheduler.aclose": within(_scheduler, "aclose", {}),
    "asynccache_shim.follow": function(follow, {}, _closed_worker),
    # stores
    "asynccache.storage.StoreOptions": plain({"name": These("'8'", "np.str_('8')"), "timeout": Number(above=0),
        "concurrency": MANY, "slow": SECONDS}),
    "asynccache.storage.ParsedUrl": plain({"options": TEXTS}, scheme="memory"),
    "asynccache.storage.Breaker": plain({"threshold": COUNT, "backoff": Number(above=0),
        "max_backoff": Number(above=0)}),
    "asynccache.storage.CheckedStore": plain({"timeout": Number(above=0), "slow": SECONDS, "concurrency": MANY,
        "threads": Integer(0, 1024)}, via=_store),
    "asynccache.storage.CheckedStore (layout)": plain(_FIELDS, via=lambda **given: _store(layout=_layout(**given))),
    "asynccache.storage.check_store (layout)": plain(_FIELDS, via=lambda **given: storage.check_store("memory:",
        _layout(**given))),
    "asynccache.storage.CheckedStore.register": within(_listed, "register", {"pool": Text(),
        "memory": These("memoryview", "2-d memoryview")}, {"pool": "full", "memory": memoryview(bytearray(64))}),
    "asynccache.storage.CheckedStore.scrub": within(_listed, "scrub", {"rate": Number(above=0, optional=True)}),
    **{f"asynccache.storage.CheckedStore.{name}": of_store(name, {"keys": These("[]")},
        keys=[PAGE_KEY]) for name in ("delete", "exists")},
    "asynccache.storage.CheckedStore.hint": of_store("hint", {"keys": These("[]"), "seconds": SECONDS},
        verb=storage.Hint.KEEP, keys=[PAGE_KEY]),
    **{f"asynccache.storage.CheckedStore.{name}": of_store(name, {"keys": Thing(), "payloads": Thing()},
        keys=[PAGE_KEY], payloads=[memoryview(bytearray(64))]) for name in ("get", "put")},
    "asynccache.storage.CheckedStore.is_away": of_store("is_away", {}, key=PAGE_KEY),
    "asynccache.storage.Breaker.allow": of_breaker("allow", {}, "now"),
    "asynccache.storage.Breaker.success": of_breaker("success", {"now": Number(optional=True)}, "permit"),
    "asynccache.storage.Breaker.failure": of_breaker("failure", {}, "permit", "now"),
    "asynccache.storage.Breaker.abandon": of_breaker("abandon", {}, "permit"),
    "asynccache.storage.Breaker.shut_for": of_breaker("shut_for", {}, "now"),
    "asynccache.storage.Pages": plain({"pools": Unchecked("made by storage.Pages.open")}, pools={}),
    "asynccache.storage.Pages.open": within(lambda world: nullcontext(), lambda world, _: lambda **given:
        storage.Pages.open(**given).close(), {"storage": Depends(Text()), "memory": Thing(), "page_bytes":
        Depends(Integer(1)), "namespace": These("'8'", "np.str_('8')", "b'8'", "bytes of a token"), "blocks":
        Function(optional=True)}, lambda world, _: {"storage": MemoryBackend(), "memory": bytearray(8192),
        "page_bytes": 4096, "namespace": "m"}),
    "asynccache.storage.Pages.exists": of_pages("exists", {"keys": EMPTY, "timeout": WITHIN}, keys=[b"a"]),
    "asynccache.storage.Pages.hint": of_pages("hint", {"keys": EMPTY, "seconds": SECONDS, "timeout": WITHIN},
        verb=storage.Hint.KEEP, keys=[b"a"]),
    "asynccache.storage.read_hints": plain({"envelope": Unchecked("whatever comes counts as malformed, at worst")},
        envelope=None),
    "asynccache.storage.RequestHints": plain(dict.fromkeys(("prefetch", "block_hashes", "keep", "keep_end", "ended",
        "ended_start", "skip_store"), Unchecked("made by storage.read_hints"))),
    **{f"asynccache.storage.Pages.{name}": of_pages(name, {"keys": Thing(), "slots": SLOTS, "timeout": WITHIN},
        keys=[b"a"], slots=[0]) for name in ("get", "put")},
    "asynccache.storage.Pages.clear": of_pages("clear", {"timeout": WITHIN}),
    "asynccache.storage.Pages.close": within(lambda world: storage.Pages.open(MemoryBackend(), bytearray(2), 2, "m"),
        "close", {"timeout": Number(0)}),
    "asynccache.storage.ParsedUrl.allow_only": of_url("allow_only", {"names": These("[]", "['8']", "{}",
        "{'a': 1}")}, names=()),
    "asynccache.storage.ParsedUrl.settings": of_url("settings", {"kind": Thing(),
        "own": Unchecked("settings of that kind, which checks them")}, kind=storage.StoreOptions),
    **{f"asynccache.storage.ThreadPool.{name}": within(_threads, name, OWN, EIGHT) for name in ("call", "run")},
    "asynccache.storage.ThreadPool.submit": within(_threads, lambda world,
        pool: lambda function: asyncio.wrap_future(pool.submit(function)), OWN, EIGHT),
    "asynccache.storage.ThreadPool.run_for": within(_threads, "run_for", {**OWN, "size": Integer()}, {**EIGHT,
        "size": 1 << 30}),
    "asynccache.storage.ThreadPool.spread": within(_threads, "spread", {"sizes": Unchecked("summed for every call"),
        "columns": Unchecked("the function's own")}, {**EIGHT, "sizes": [1 << 30]}),
    "asynccache.storage.OpenCalls": plain({}, name="w"),
    "asynccache.storage.completed": function(storage.completed, {"work": Thing()}, lambda world,
        _: {"work": asyncio.sleep(0)}),
    "asynccache.storage.completed_in_thread": function(storage.completed_in_thread, OWN, {"function": int}),
    "asynccache.storage.settled": function(storage.settled, {"futures": These("[]")}, _done),
    "asynccache.storage.check_stores": Case(_check_stores, {"urls": OneOf(These("[]"), Depends(These("['8']")))},
        names={"urls": "storage"}),
    "asynccache.storage.ThreadPool": plain({"count": Integer(0, 1024)}, count=1, name="w"),
    "asynccache.storage.backend_class": plain({"scheme": Depends(Text())}, scheme="memory"),
    "asynccache.storage.check_store": plain({"url": Depends(Text())}, url="memory:", layout=LAYOUT),
    "asynccache.storage.parse_host_port": plain({"default": Integer(1, 65535, optional=True)}, text="host:1"),
    "asynccache.storage.open_store": plain({"url": Depends(Text()), "timeout": Number(above=0, optional=True)},
        url="memory:", layout=LAYOUT),
    "asynccache.storage.parse_size": plain({"text": Depends(Text())}, name="size",
        text="8", told={"text": "size"}),
    "asynccache.storage.parse_url": plain({"text": Depends(Text())}, text="memory:"),
    "asynccache.storage.take_options": plain({}, url=storage.ParsedUrl("memory")),
    "asynccache.storage.weights_digest": plain({"model": Depends(Text()), "cache": Text(optional=True)},
        model=WEIGHTS.name),
    # events
    "asynccache.events.ZmqPublisher": plain({"rank": Integer(0, INT32, optional=True), "keep": Integer(1, 1 << 30),
        "keep_bytes": COUNT, "gather": Number(0, 60), "backlog": COUNT, "high_water": Integer(1, INT32), "first":
        Integer(0, 1 << 62)}, endpoint="inproc://edge", layout=events.EventLayout.MAP),
    "asynccache.events.ZmqPublisher.close": within(lambda world: closing(events.ZmqPublisher("inproc://edge-close")),
        "close", {"timeout": Number(0, threading.TIMEOUT_MAX)}),
    "asynccache.events.Subscriber": plain({"patience": Number(0, 1e6)}, endpoint="inproc://edge"),
    "asynccache.events.Subscriber.receive": within(lambda world: events.Subscriber("inproc://edge-receive"),
        _received, {"timeout": Number(0, 1e6)}, {"timeout": 0}),
    "asynccache.events.ZmqPublisher.__call__": within(_publisher, "__call__", {}, {"notice": Cleared()}),
    "asynccache.events.Mirror.note": of_mirror("note", {}, lambda event: event),
    "asynccache.events.Mirror.note (event)": of_mirror("note", {"block_hashes": INTEGERS,
        "medium": Text(optional=True)}, _stored),
    "asynccache.events.Mirror.apply": of_mirror("apply", {}, lambda batch: batch),
    "asynccache.events.Mirror.apply (batch)": of_mirror("apply", {"events": These("[]")},
        lambda **given: events.EventBatch(0.0, **given)),
    "asynccache.events.Mirror.apply (event)": of_mirror("apply", {"event": Thing()},
        lambda event: events.EventBatch(0.0, [_stored(), event])),
    "asynccache.events.Mirror.prefix": plain({"medium": Text(("GPU", "CPU"))}, hashes=[1], via=events.Mirror().prefix),
    "asynccache.events.Fleet": Case(_fleet, {"patience": Number(high=1e6, above=0), "check": Number(high=1e6,
        above=0), "silence": Number(high=6000, above=0)}),
    "asynccache.events.Fleet.add": of_fleet("add", {"server": Depends(Text()), "streams": These("[]")}, server="a",
        streams=[]),
    "asynccache.events.Fleet.remove": of_fleet("remove", {"server": Text(("there",))}, server="there"),
    "asynccache.events.Fleet.hits": of_fleet("hits", {}, hashes=[1]),
    "asynccache.events.Fleet.add (stream)": Case(_followed, {"stream": Thing()}),
    "asynccache.events.Fleet.add (stream's fields)": Case(_followed, {"endpoint": Depends(Text()),
        "replay": Depends(Text(optional=True)), "topic": Text(), "layout": Member()}),
    "asynccache.events.prompt_blocks": plain({"tokens": Depends(INTEGERS), "page_size": Integer(1, 1 << 16),
        "namespace": Namespace()}, tokens=[1, 2], model="m", page_size=1),
    # metrics
    "asynccache.metrics.LoopLag": plain({"tick": Number(above=0)}),
    "asynccache.metrics.CacheCollector": function(CacheCollector, {}, _cache),
    "asynccache.metrics.app": function(app, {}, _cache),
    "asynccache.metrics.start_metrics_server": Case(_served, {"host": Text(("127.0.0.1",)), "port": Integer(0,
        65535)}),
}  # fmt: skip


def kind_of(annotation: str) -> Kind | None:
    """What a parameter takes whose annotation is this; None: the annotation does not say it, as of numbers."""
    name, optional = annotation.removesuffix(" | None"), annotation.endswith(" | None")
    if name.startswith("Callable["):
        return Function(optional=optional)
    if name in _KINDS and (name != "Namespace" or not optional):
        return _KINDS[name](optional)
    return Thing(optional=optional) if re.fullmatch(r"(\w+\.)*_?[A-Z]\w+", name) else None


def derived(member: Any) -> dict[str, Kind]:
    """What the parameters of a public call take, as far as their names and annotations say that."""
    found = {one.name: BY_NAME.get(one.name) or kind_of(_written(one.annotation))
             for one in inspect.signature(member).parameters.values()
             if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}  # fmt: skip
    return {name: kind for name, kind in found.items() if kind is not None}


def _member(name: str) -> Any:
    package = max((one for one in PACKAGES if name.startswith(f"{one}.")), key=len)
    return attrgetter(name.removeprefix(f"{package}."))(importlib.import_module(package))


def _written(annotation: Any) -> str:
    """An annotation as text, without what it says besides the type."""
    bare = getattr(annotation, "__origin__", annotation) if hasattr(annotation, "__metadata__") else annotation
    return bare if isinstance(bare, str) else inspect.formatannotation(bare)


CALLS: dict[str, Case] = {}
for _name, _entry in EXCEPTIONS.items():
    _named = None if "(" in _name else _member(_name)
    _case = _entry if isinstance(_entry, Case) else _entry(_named)
    CALLS[_name] = _case if _named is None else _case._replace(params={**derived(_named), **_case.params})

_VALUE = "a value: events.Mirror checks of an event what it takes up, and msgspec all of one that comes from the wire"

_GROUP = "a cache with workers only takes it: tests/group/test_group_calls.py calls it with all that is odd"

NOT_CALLED: dict[str, Unchecked] = {
    **{f"asynccache.DevicePool{name}": Unchecked("a cache makes its pools; tests/memory has what they refuse")
       for name in ("", ".allocate", ".layer", ".kv", ".states", ".block_table")},
    "asynccache.storage.ThreadPool.map": Unchecked("inherited as it is from concurrent.futures.Executor"),
    "asynccache.storage.ThreadPool.shutdown": Unchecked("as that of Executor: it looks at neither argument"),
    **{f"asynccache.AsyncCache.{name}": Unchecked(_GROUP) for name in ("send_batch", "batch_ended")},
    "asynccache.AsyncCache.block_table": Unchecked("of a pool with a shape: tests/runtime/test_explain.py"),
    "asynccache.metrics.MetricsServer": Unchecked("start_metrics_server makes it"),
    "asynccache.Lease": Unchecked("AsyncCache.lease makes it, and takes all that it is made of"),
    **{f"asynccache.events.{name}": Unchecked(_VALUE) for name in ("BlockRemoved", "BlockStored", "EventBatch")},
}
