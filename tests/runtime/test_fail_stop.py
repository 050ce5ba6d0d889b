"""Fail-stop: when a core call raises an error that it does not document, either nothing has changed or the cache is
closed.

An exception is raised before each line of the core, one line a world. Then the cache must be closed with that
exception and everybody must have been told; or the audit holds, nothing is left behind and requests are served right.
The core itself catches nothing, so what the runtime does about an exception depends on the call and not on the
line. The worlds reach nearly all lines all the same.
"""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheClosed, core
from asynccache.core.cache import CacheCore
from asynccache.core.passes import Survey, Unsaved
from asynccache.core.plan import EMPTY, More, Plan
from asynccache.runtime.core_calls import drive
from asynccache.runtime.driver import Driver
from tests.runtime.fail_stop_kit import Injected, Injector, Point, grained, play, points
from tests.runtime.runtime_kit import parts, serve, settings, text, turns

PARTS = 4
SEEDS = (2, 7, 21, 29, 34, 35, 42, 51, 58, 59, 60, 69, 72, 85, 89, 90, 101, 113, 119, 120, 125, 131, 132, 137)
"""Of the first 150 these reach as much as all together."""

pytestmark = pytest.mark.source                          # compiled lines are not traced

@pytest.fixture(scope="module")
def first() -> dict[Point, int]:
    """The lines that the worlds reach, and the seed of the world in which each is reached soonest."""
    found: dict[Point, tuple[int, int]] = {}
    for seed in SEEDS:
        injector = Injector()
        play(seed, injector)
        for point, steps in injector.seen.items():
            found[point] = min(found.get(point, (steps, seed)), (steps, seed))
    return {point: seed for point, (_, seed) in sorted(found.items())}


def violations(chosen: Iterable[tuple[Point, int]]) -> list[str]:
    """What is wrong after an exception at each of these lines, in its world."""
    wrong = []
    for point, seed in chosen:
        injector = Injector(point)
        try:
            play(seed, injector)
            assert injector.fired, "it was not reached again"
        except Exception as error:  # a deadlock, a task that is left, a wrong page
            wrong.append(f"{point} (seed {seed}): {type(error).__name__}: {error}")
    return wrong


@pytest.mark.slow(15)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_core_that_raises_at_any_line_has_changed_nothing_or_closes_the_cache(
    part: int, first: dict[Point, int]
) -> None:
    assert violations(list(first.items())[part::PARTS]) == []


@pytest.mark.slow(8)
def test_without_fail_stop_that_is_found_out(monkeypatch: pytest.MonkeyPatch, first: dict[Point, int]) -> None:
    monkeypatch.setattr(Driver, "_break", lambda driver, error: None)
    commits = [(point, seed) for point, seed in first.items() if point.file.endswith("commits.py")]
    assert len(violations(commits[::10])) > 3


@pytest.mark.slow(11)
def test_nearly_every_line_of_the_core_is_reached_by_a_world(first: dict[Point, int]) -> None:
    unreached = points() - first.keys()
    assert len(unreached) < len(first) / 25, "\n".join(map(str, sorted(unreached)))


@pytest.mark.slow(11)
def test_every_call_of_the_core_is_made_in_a_world(first: dict[Point, int]) -> None:
    """What the runtime does about an exception depends on the call. Only the audit calls those whose names begin with
    ``active``."""
    folder = Path(core.__path__[0])
    reached = {(Path(point.file).name, point.line) for point in first}
    calls = [(name, node) for name in ("cache.py", "passes.py")
             for node in ast.walk(ast.parse((folder / name).read_text("utf-8")))
             if isinstance(node, ast.FunctionDef) and not node.name.startswith(("_", "active"))]  # fmt: skip
    assert len(calls) > 30
    never = [f"{name}: {node.name}" for name, node in calls
             if reached.isdisjoint((name, line) for line in range(node.lineno + 1, (node.end_lineno or 0) + 1))]
    assert never == []


def test_the_core_catches_nothing_so_an_exception_leaves_every_call_of_it_wherever_it_is_raised() -> None:
    """So it is enough to raise at each line once, and not in each of the calls that run it."""
    folder = Path(core.__path__[0])
    trees = {file.name: ast.parse(file.read_text("utf-8")) for file in folder.rglob("*.py")}
    assert len(trees) > 15
    assert [name for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.Try)] == []


async def test_a_core_that_raised_is_asked_nothing_more_also_by_those_who_are_in_the_middle_of_a_call() -> None:
    asked = 0

    def call() -> Plan | More:
        nonlocal asked
        asked += 1
        return More(EMPTY) if asked == 1 else EMPTY

    def fails() -> Plan:
        raise Injected("between two slices")

    cache = await AsyncCache(settings()).__aenter__()
    driver = parts(cache).driver
    slices = asyncio.ensure_future(drive(driver, call, driver.perform))
    await turns(1)
    with pytest.raises(Injected):
        driver.call_unlocked(fails)
    with pytest.raises(CacheClosed, match="between two slices"):
        await slices
    assert asked == 1
    parts(cache).driver.core = parts(cache).core = None  # type: ignore[assignment]  # whoever asks fails
    report = await cache.aclose()
    assert isinstance(report.error, Injected)
    assert report[:2] == (0, 0)


async def test_a_core_that_breaks_between_two_slices_of_the_last_survey_is_what_the_report_of_aclose_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails() -> Plan:
        raise Injected("between two slices")

    def unsaved(survey: Survey) -> Unsaved | More:
        asked.append(survey)
        if survey is not asked[0]:  # the first one is that of ``save``
            asyncio.get_running_loop().call_soon(break_it)
        return usual(survey)

    def break_it() -> None:
        with pytest.raises((Injected, CacheClosed)):
            driver.call_unlocked(fails)

    asked: list[Survey] = []
    usual = Survey.unsaved
    with grained(1):
        cache = await AsyncCache(settings(device=8)).__aenter__()
    driver = parts(cache).driver
    for seed in range(3):
        await serve(cache, text(2, seed))
    monkeypatch.setattr(Survey, "unsaved", unsaved)
    report = await cache.aclose()
    assert isinstance(report.error, Injected)
    assert report[:2] == (0, 0)
    assert [survey is asked[0] for survey in asked[-2:]] == [True, False]


async def test_a_survey_that_raises_as_the_cache_closes_stops_all_of_it_and_is_what_aclose_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def survey(core: CacheCore) -> Survey:
        raise Injected("as it began")

    cache = await AsyncCache(settings(device=8)).__aenter__()
    monkeypatch.setattr(CacheCore, "survey", survey)
    for _ in range(2):
        with pytest.raises(Injected):
            await cache.aclose(0)
    assert parts(cache).driver.broken
    assert "Injected" in str(cache.closed)
    assert not parts(cache).supervisor.running
