"""The kinds of values that parameters take, what must happen with an odd value, and a cache whose books are checked
afterwards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from enum import Enum
from typing import Any, NamedTuple

from asynccache import AsyncCache, CacheFull, ConfigError, Lease
from asynccache.core.audit import check
from asynccache.memory.cpu import CpuDevice
from tests.edge.odd_values import Odd
from tests.runtime.runtime_kit import compute, parts, settings, settled, text
from tests.sidecars import sidecar_kit

PACKAGES = ("asynccache", "asynccache_shim", "asynccache.storage", "asynccache.events", "asynccache.metrics")
POOLS = ("full", "swa")


class StillBroken(AssertionError):
    """After a refusal, the same call with good arguments did not succeed."""


# what parameters take


class Kind:
    """``takes(odd)``: whether a parameter of this kind takes the value; None: it depends on the cache. ``optional``:
    whether it takes None; None: ``test`` says so."""

    def __init__(self, test: Callable[[Odd], bool | None], optional: bool | None = None) -> None:
        self._test, self._optional = test, optional

    def takes(self, odd: Odd) -> bool | None:
        return self._optional if odd.name == "None" and self._optional is not None else self._test(odd)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


class Integer(Kind):
    def __init__(self, low: int | None = None, high: int | None = None, *, optional: bool = False) -> None:
        super().__init__(lambda odd: _within(odd.integer, low, high), optional)


class Number(Kind):
    def __init__(
        self, low: float | None = None, high: float | None = None, *, above: float | None = None, optional: bool = False
    ) -> None:
        super().__init__(lambda odd: _within(odd.number, low, high) and odd.number != above
                         and _within(odd.number, above, None), optional)  # fmt: skip


class Flag(Kind):
    def __init__(self, *, optional: bool = False) -> None:
        super().__init__(lambda odd: odd.flag is not None, optional)


class Text(Kind):
    """``among``: the texts that are taken; None: any is."""

    def __init__(self, among: tuple[str, ...] | None = None, *, optional: bool = False) -> None:
        super().__init__(lambda odd: odd.text is not None and (among is None or odd.text in among), optional)


class Namespace(Kind):
    def __init__(self) -> None:
        super().__init__(lambda odd: odd.text is not None or isinstance(odd.make(), bytes), optional=True)


class Tokens(Kind):
    """``least``: how many there must be."""

    def __init__(self, least: int = 0) -> None:
        super().__init__(lambda odd: odd.row is not None and len(odd.row) >= least)


class Member(Kind):
    """A member of an enum: none of the values is one, nor the name of one."""

    def __init__(self, *, optional: bool = False) -> None:
        super().__init__(lambda odd: False, optional)


Thing = Member
"""An object of some class, or with some methods: none of the values is one."""


class Function(Kind):
    def __init__(self, *, optional: bool = False) -> None:
        super().__init__(lambda odd: callable(odd.make()), optional)


class These(Kind):
    """The values of these names, and no others."""

    def __init__(self, *names: str) -> None:
        super().__init__(lambda odd: odd.name in names)


class OneOf(Kind):
    def __init__(self, *kinds: Kind) -> None:
        def test(odd: Odd) -> bool | None:
            answers = [kind.takes(odd) for kind in kinds]
            return True if True in answers else None if None in answers else False

        super().__init__(test)


class Depends(Kind):
    """Whether a value is taken depends on the cache; a value that is not taken must be refused all the same."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(lambda odd: None if kind.takes(odd) else False)


class Unchecked(NamedTuple):
    """A parameter, or all of a class or function, that is not held against odd values, and why."""

    why: str


# the books


class World:
    """A cache of all components with a store, and requests of it. ``counted``: how many of their tokens were cached."""

    def __init__(self) -> None:
        self.cache: AsyncCache
        self.counted = 0
        self._stack = AsyncExitStack()
        self._device = CpuDevice()
        self._requests = 0
        self._once: dict[str, Any] = {}

    async def open(self) -> None:
        config = settings(device=16, host=32, swa=14, mamba=8, storage="memory:?name=own", close_timeout=0.5)
        self.cache = await self._stack.enter_async_context(AsyncCache(config, device=self._device))
        self._tasks = asyncio.all_tasks()

    async def reopen(self) -> None:
        """Open a new cache in place of one that was closed."""
        await self._stack.aclose()
        self._once.clear()
        await self.open()

    async def close(self) -> None:
        await self._stack.aclose()
        await self._device.aclose()

    def once(self, name: str, made: Callable[[], AbstractContextManager[Any]]) -> Any:
        """The object that ``made`` gives: entered when it is first asked for, and left with this world."""
        if name not in self._once:
            self._once[name] = self._stack.enter_context(made())
        return self._once[name]

    def prompt(self, number: int = 0) -> list[int]:
        """One of six prompts, of 3 to 5 pages and a token."""
        return text(3 + number % 3, seed=1 + number % 6, extra=1)

    @asynccontextmanager
    async def lease(self, **terms: Any) -> AsyncIterator[Lease]:
        """A lease whose pages are computed and not committed yet."""
        prompt = self.prompt()
        async with self.cache.lease(prompt, **{"new_tokens": 8, **terms}) as lease:
            await lease.loaded()
            sidecar_kit.verify(self.cache, lease, prompt)
            compute(self.cache, lease, prompt, POOLS)
            yield lease

    async def serve(self, count: int = 20) -> None:
        """Ordinary requests, each verified byte by byte."""
        for _ in range(count):
            self._requests += 1
            self.counted += await sidecar_kit.serve(self.cache, self.prompt(self._requests))

    def audit(self) -> None:
        """The books, with whatever is in flight, after everybody has left."""
        core = self.cache.core
        assert self.cache.closed is None, self.cache.closed
        check(core)
        assert not core.active_leases(), "a lease is held by nobody"
        assert not parts(self.cache).driver.line, "somebody stands in line"

    async def audit_idle(self) -> None:
        """The books when nothing is in flight: nothing is held, and no task is left but the cache's own."""
        parts(self.cache).prefetches.drop_claims()
        await settled(self.cache)
        for _ in range(100):
            if asyncio.all_tasks() <= self._tasks:
                break
            await asyncio.sleep(0)
        assert asyncio.all_tasks() <= self._tasks, asyncio.all_tasks() - self._tasks
        await settled(self.cache)
        check(self.cache.core, idle=True)


# one call


Call = Callable[[World, Mapping[str, Any]], Awaitable[None]]


class Case(NamedTuple):
    """``call(world, arguments)`` calls the function with good arguments but for those that are given. ``params``: what
    each of its parameters takes. ``books``: whether the call reaches a cache. ``names``: what errors call a parameter,
    where that is another name."""

    call: Call
    params: Mapping[str, Kind | Unchecked]
    books: bool = False
    names: Mapping[str, str] = {}


async def called(function: Callable[..., Any], good: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Call the function with good arguments, except those that are ``given``; returns its result. After a refusal it is
    called again with good arguments, which must succeed, and the refusal is raised."""
    try:
        return await result_of(function(**{**good, **given}))
    except ConfigError:
        try:
            await result_of(function(**good))
        except Exception as error:
            raise StillBroken(f"good arguments were refused after a refusal: {error!r}") from error
        raise


async def result_of(answer: Any) -> Any:
    """``answer``, awaited if it can be."""
    return await answer if inspect.isawaitable(answer) else answer


async def problem_of(case: Case, world: World, name: str, kind: Kind, odd: Odd) -> str | None:
    """Say what is wrong with the way in which ``odd`` was treated as parameter ``name``; None if nothing is."""
    takes = kind.takes(odd)
    try:
        async with asyncio.timeout(20):
            await case.call(world, {name: odd.make()})
    except ConfigError as error:
        if takes:
            return f"{name}={odd.name} is good, and was refused: {error}"
        named = name in str(error) or case.names.get(name, name) in str(error)
        return None if named else f"{name}={odd.name}: not named: {error}"
    except (CacheFull, OSError) as error:
        return None if takes is not False else f"{name}={odd.name}: taken, and then {error!r}"
    except Exception as error:
        return f"{name}={odd.name}: {error!r}"
    return None if takes is not False else f"{name}={odd.name} was taken"


def public(member: object) -> bool:
    """Whether a class's or module's member is for callers to call: no enum, error, protocol or type of results."""
    if not inspect.isclass(member):
        return inspect.isfunction(member)
    values = (tuple, BaseException, Enum)
    return not issubclass(member, values) and not getattr(member, "_is_protocol", False)
