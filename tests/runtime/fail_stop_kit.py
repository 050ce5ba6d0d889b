"""The core with a call after each of its statements. The call notes that the statement was reached, or raises an
exception.

``FailStopWorld`` is a world in which that happens.

The functions of the core are compiled again with a call at every statement, and given back their own code at the end.
The call stands after a simple statement, behind the value of a ``return``, and before statements that nothing follows
or that end in several places: ``raise``, ``continue``, ``break``, and statements that have statements in them.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from inspect import isclass, unwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from asynccache import AsyncCache, AsyncCacheError, CacheClosed, CacheConfig, core
from asynccache.core import eviction, ledger, policies
from asynccache.core.audit import check
from asynccache.core.policies import POLICIES, P2c
from asynccache.core.settings import CoreConfig
from asynccache.runtime import head
from asynccache.runtime.core_calls import holding
from tests.simulated import world
from tests.simulated.backend import Hostility
from tests.simulated.loop import SimulatedLoop

_CALL = "_at_point"
_VALUE = "_returned"
_NOT_CALLED = ("asynccache.core.audit",)
"""Modules that no call of the cache runs."""

_BEFORE = (
    ast.If, ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.FunctionDef, ast.Raise, ast.Continue, ast.Break,
)  # fmt: skip


class Point(NamedTuple):
    """A statement of the core: its file in the core's folder, the function that it stands in, its line, its source
    (the first line only, if the statement has others in it)."""

    file: str
    function: str
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}: {self.source}"


class Injected(Exception):
    """The exception that is raised after a statement of the core."""


class Injector:
    """Notes the points that are passed while it is ``armed``, and raises where ``target`` is passed first."""

    def __init__(self, target: int | None = None, clock: Callable[[], int] = int) -> None:
        self.target = target
        self.clock = clock
        self.seen: dict[int, int] = {}
        self.fired = False

    def at(self, point: int) -> None:
        """Called by the core when it passes this point."""
        if self.target is None:
            self.seen.setdefault(point, self.clock())
        elif point == self.target and not self.fired:
            self.fired = True
            raise Injected(str(POINTS[point]))


POINTS: list[Point] = []
"""Every statement of the core that is within a function, by number. Docstrings are none."""


@contextmanager
def points() -> Iterator[None]:
    """The core has points as long as the block runs. They do nothing unless ``armed``."""
    before: list[tuple[FunctionType, CodeType]] = []
    POINTS.clear()
    try:
        for module in _modules():
            assert module.__file__ is not None
            with open(module.__file__, encoding="utf-8") as file:
                tree = ast.parse(file.read())
            _Pointing(module.__name__.removeprefix(core.__name__ + ".")).visit(tree)
            codes = dict(_codes(compile(ast.fix_missing_locations(tree), module.__file__, "exec")))
            setattr(module, _CALL, _nothing)
            for function in _functions(module):
                if function.__qualname__ in codes:
                    before.append((function, function.__code__))
                    function.__code__ = codes.pop(function.__qualname__)
            left = [name for name, code in codes.items() if "<" not in name and code.co_flags & 1]
            assert not left, f"{module.__name__}: nothing has the code of {left}"
        yield
    finally:
        for function, code in before:
            function.__code__ = code


@contextmanager
def armed(injector: Injector) -> Iterator[None]:
    """Every point that the core passes while the block runs is told to ``injector``."""
    _set(injector.at)
    try:
        yield
    finally:
        _set(_nothing)


def _set(call: Callable[[int], None]) -> None:
    for module in _modules():
        setattr(module, _CALL, call)


def _nothing(point: int) -> None:
    pass


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(core.__path__, core.__name__ + ".")
    return [importlib.import_module(module.name) for module in found if module.name not in _NOT_CALLED]


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant.co_qualname, constant
            yield from _codes(constant)


def _functions(holder: Any) -> Iterator[FunctionType]:
    """The functions that a module or a class defines."""
    name = holder.__name__ if not isclass(holder) else holder.__module__
    for value in list(vars(holder).values()):
        function = unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
        if isinstance(function, FunctionType) and function.__module__ == name:
            yield function
        elif isclass(value) and value.__module__ == name and not (isclass(holder) and value is holder):
            yield from _functions(value)


class _Pointing(ast.NodeTransformer):
    """Adds the calls, and notes the points."""

    def __init__(self, module: str) -> None:
        self._file = module.replace(".", "/") + ".py"
        self._within: list[str] = []
        self._in_function = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        assert not self._in_function, f"{node.name}: a function in a function has no place here yet"
        self._within.append(node.name)
        self._in_function = True
        documented = ast.get_docstring(node) is not None
        node.body = node.body[:documented] + self._block(node.body[documented:])
        self._in_function = False
        self._within.pop()
        return node

    def _block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [made for statement in body for made in self._statement(statement)]

    def _statement(self, statement: ast.stmt) -> list[ast.stmt]:
        call = self._call(statement)
        for field in ("body", "orelse", "finalbody"):
            if block := getattr(statement, field, None):
                setattr(statement, field, self._block(block))
        for case in [*getattr(statement, "cases", ()), *getattr(statement, "handlers", ())]:
            case.body = self._block(case.body)
        if isinstance(statement, ast.Return) and statement.value is not None:
            keep = ast.Assign([ast.Name(_VALUE, ast.Store())], statement.value)
            made = [keep, call, ast.Return(ast.Name(_VALUE, ast.Load()))]
        elif isinstance(statement, (*_BEFORE, ast.Return)):
            made = [call, statement]
        else:
            made = [statement, call]
        return [ast.copy_location(each, statement) for each in made]

    def _call(self, statement: ast.stmt) -> ast.stmt:
        source = ast.unparse(statement).split("\n")[0]
        POINTS.append(Point(self._file, ".".join(self._within), statement.lineno, source))
        return ast.Expr(ast.Call(ast.Name(_CALL, ast.Load()), [ast.Constant(len(POINTS) - 1)], []))


# a world in whose core an exception is raised


class FailStopWorld(world.World):
    """Where nothing is raised, or nothing has changed, all goes on. If the cache is closed, that is the reason."""

    def __init__(self, loop: SimulatedLoop, seed: int, injector: Injector) -> None:
        super().__init__(loop, world.draw_climate(seed))
        self.injector = injector
        if seed % 4 == 0:  # a store that is late
            self.stores["backend"].hostility = Hostility(delay=0.3)
        injector.clock = lambda: loop.steps

    def make(self, **more: Any) -> AsyncCache:
        return super().make(on_event=[].append if self.loop.seed % 2 else None)

    async def live(self) -> None:
        if self.injector.fired:
            return
        self.cache = self.make()
        with self._excused(), ExitStack() as arming:
            arming.enter_context(armed(self.injector))
            async with asyncio.timeout(600), self.cache:
                with self._excused():
                    await self.requests(self.climate.requests)
                    await self.settle()
                arming.close()
                if self.cache.closed is None:
                    await self._go_on()
                else:
                    assert "Injected" in self.cache.closed
                    with pytest.raises(CacheClosed):
                        await self.cache.match([1])
        await self.engine()

    async def _go_on(self) -> None:
        """Nothing was left behind by the call that raised, and requests are served right."""
        await self.settle()
        opened = self.cache._opened()
        opened.prefetches.drop_claims()
        async with holding(opened.driver.lock):
            while opened.core.world.dead_roots:
                opened.driver.perform(opened.driver.call_locked(opened.core.follow_up))
        check(opened.core, idle=True)
        await self.requests(2)

    def failed(self, error: BaseException) -> None:
        with self._excused():
            raise error

    @contextmanager
    def _excused(self) -> Iterator[None]:
        """What was raised here may come out, and what it has closed."""
        try:
            yield
        except (Injected, AsyncCacheError) as error:
            if not (self.injector.fired and isinstance(error, (Injected, CacheClosed))):
                raise


def play(seed: int, injector: Injector) -> None:
    """Play the world of this seed.

    Raises:
        Exception: fail-stop does not hold, or something else is wrong.
    """
    with grained(seed % 3):
        world.played(seed, world.draw_climate(seed).leads, lambda loop: FailStopWorld(loop, seed, injector))


@contextmanager
def grained(steps: int) -> Iterator[None]:
    """The core's limits are so small that small worlds reach them."""
    def small(config: CacheConfig) -> CoreConfig:
        return replace(usual(config), slice_steps=steps or usual(config).slice_steps)

    usual = CacheConfig.core
    with (
        patch.object(CacheConfig, "core", small),
        patch.object(eviction, "_SLICE", 2), patch.dict(POLICIES, {"p2c": lambda config: P2c(config, learn_every=2)}),
        patch.object(policies, "_COHORTS", 2), patch.object(policies, "_MOST_GHOSTS", 4),
        patch.object(policies, "_PRIOR_BLOCKS", 0.01), patch.object(policies, "_MOST_PAGES", 24),
        patch.object(policies, "_FEWEST", 4), patch.object(policies, "_ALARM", 4.0),
        patch.object(ledger, "_SHORT", 4), patch.object(head, "REMEMBERED", 4),
    ):  # fmt: skip
        yield
