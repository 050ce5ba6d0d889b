"""A value that is passed to a public parameter is taken for what it means, or refused by name before anything has
changed.

Each public parameter is given each of the odd values. Afterwards the core's books are in order, nothing is held without
an owner, no task is left, and ordinary requests are served the right bytes.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asynccache import checks
from tests.edge.edge_kit import PACKAGES, Case, Kind, World, problem_of, public
from tests.edge.odd_values import ODD
from tests.edge.public_calls import CALLS, NOT_CALLED

pytestmark = pytest.mark.slow(0.4)


def signatures() -> Iterator[tuple[str, set[str]]]:
    """Every public function, class and method that has parameters, by name."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            member = getattr(module, name)
            if public(member):
                yield from _of_member(f"{package}.{name}", member)


def _of_member(name: str, member: Any) -> Iterator[tuple[str, set[str]]]:
    if params := _parameters(member):
        yield name, params
    if inspect.isclass(member):
        for method, function in inspect.getmembers(member, _is_method):
            inherited = issubclass(member, str) and hasattr(str, method)
            called = method == "__call__" or not method.startswith("_")
            if called and not inherited and (params := _parameters(function) - {"self"}):
                yield f"{name}.{method}", params


def _is_method(member: Any) -> bool:
    """Of an instance, or of the class."""
    return inspect.isfunction(member) or inspect.ismethod(member)


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_every_public_parameter_is_in_the_tables() -> None:
    """A new parameter whose annotation does not say what it takes is entered in ``public_calls.py``."""
    found = dict(signatures())
    assert len(ODD) >= 25
    assert len({odd.name for odd in ODD}) == len(ODD)
    assert found.keys() - CALLS.keys() - NOT_CALLED.keys() == set(), "not in CALLS"
    assert NOT_CALLED.keys() - found.keys() == set(), "in NOT_CALLED, and not public"
    assert {name for name in CALLS if "(" not in name} - found.keys() <= {"asynccache_shim.Sampling"}, "not public"
    missing = {name: params - set(CALLS[name].params) for name, params in found.items() if name in CALLS}
    assert {name: params for name, params in missing.items() if params} == {}


async def fuzzed(case: Case, odd_values: Any = ODD, only: str | None = None) -> list[str]:
    """What is wrong with how a call takes each odd value as each of its parameters."""
    world = World()
    await world.open()
    problems: list[str] = []
    try:
        if case.books:
            await world.serve()
        for name, kind in case.params.items():
            if isinstance(kind, Kind) and only in (None, name):
                problems += await _one_parameter(case, world, name, kind, odd_values)
        assert world.counted or not case.books, "nothing was cached: no bytes were verified"
    finally:
        await world.close()
    return problems


async def _one_parameter(case: Case, world: World, name: str, kind: Kind, odd_values: Any) -> list[str]:
    problems = []
    for odd in odd_values:
        problem = await problem_of(case, world, name, kind, odd)
        if problem is not None:
            problems.append(problem)
        if case.books:
            world.audit()
    if case.books:
        await world.audit_idle()
        await world.serve()
        await world.audit_idle()
    return problems


@pytest.mark.parametrize("name", CALLS)
async def test_odd_values_are_taken_for_what_they_mean_or_refused_by_name(name: str) -> None:
    assert await fuzzed(CALLS[name]) == []


REMOVED = [
    ("integer", "new_tokens", "asynccache.AsyncCache.lease"),
    ("integer", "states", "asynccache.AsyncCache.lease"),
    ("integer", "chunk", "asynccache.AsyncCache.lease"),
    ("flag", "wait", "asynccache.AsyncCache.lease"),
    ("namespace", "namespace", "asynccache.AsyncCache.match"),
    ("number", "ttl", "asynccache.AsyncCache.keep"),
    ("number", "timeout", "asynccache.AsyncCache.aclose"),
    ("integer", "tokens", "asynccache.Lease.extend"),
    ("integer", "position", "asynccache.Lease.advance"),
    ("integer", "length", "asynccache.Lease.truncate"),
    ("flag", "ended", "asynccache.Lease.release"),
    ("integer", "checkpoint: slot", "asynccache.Lease.commit (state)"),
    ("integer", "checkpoint: position", "asynccache.Lease.commit (checkpoint)"),
    ("integer", "page_size", "asynccache.CacheConfig"),
    ("number", "timeout", "asynccache.storage.CheckedStore"),
    ("integer", "page_bytes", "asynccache.storage.Pages.open"),
    ("integer", "permit", "asynccache.storage.Breaker.failure"),
    ("instance", "payloads", "asynccache.storage.CheckedStore.put"),
    ("integers", "event: block_hashes", "asynccache.events.Mirror.note (event)"),
    ("instance", "prefetch", "asynccache.PrefetchHandle"),
]


@pytest.mark.filterwarnings("ignore")  # what a broken cache leaves behind
@pytest.mark.parametrize(("check", "parameter", "call"), REMOVED, ids=[f"{call}-{name}" for _, name, call in REMOVED])
async def test_a_check_that_is_removed_is_noticed(
    monkeypatch: pytest.MonkeyPatch, check: str, parameter: str, call: str
) -> None:
    remove(monkeypatch, check, parameter)
    try:
        problems = await fuzzed(CALLS[call], only=parameter.rpartition(" ")[2])
    except Exception as error:  # books that are broken show in many ways
        problems = [repr(error)]
    assert problems


def remove(monkeypatch: pytest.MonkeyPatch, check: str, parameter: str) -> None:
    """``check`` lets everything pass as ``parameter``, wherever it was imported."""
    original: Callable[..., Any] = getattr(checks, check)

    def without(name: str, value: Any, *bounds: Any, **more: Any) -> Any:
        return value if name == parameter else original(name, value, *bounds, **more)

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("asynccache") and vars(module).get(check) is original:
            monkeypatch.setattr(module, check, without)
