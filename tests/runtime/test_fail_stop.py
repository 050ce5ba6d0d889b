"""Fail-stop: when a core call raises an error that it does not document, either nothing has changed or the cache is
closed.

An exception is raised after each statement of the core, one statement a world. Then the cache must be closed with that
exception and everybody must have been told; or the audit holds, nothing is left behind and requests are served right.
The worlds reach every statement but those of ``UNREACHED``, and a statement that is new must be reached, too.
"""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from asynccache import AsyncCache, CacheClosed, core
from asynccache.core.cache import CacheCore
from asynccache.core.passes import Survey, Unsaved
from asynccache.core.plan import EMPTY, More, Plan
from asynccache.runtime.core_calls import drive
from asynccache.runtime.driver import Driver
from tests.runtime.fail_stop_kit import POINTS, Injected, Injector, points
from tests.runtime.fail_stop_worlds import PLAYS, grained, run
from tests.runtime.runtime_kit import parts, serve, settings, text, turns

PARTS = 4

pytestmark = pytest.mark.source                          # it puts a call behind each statement

UNREACHED = {
    r"raise (InvariantViolation|illegal)\(": "a law of the core is broken, which the audit would find; it closes the "
                                             "cache as any other error does",
    r"tree\.py:\d+ illegal: ": "makes the error of such a law",
    r"\.__repr__: ": "called by whoever reads a log, and by no call of the core",
    r"CacheCore\.active_|Order\.entries|SlotPool\.free": "read by the audit and by tools",
    r"SlotPool\.give: self\.given": "noted for debug=True alone",
    r"EvictionPolicy\.": "what a policy does that says nothing else, which no policy here leaves unsaid",
    r"needed_pages: return (tuple\(range\(anchor, stop\)\)|\(\))": "arithmetic for shapes that tests ask for",
    r"CacheCore\.commit: raise ConfigError": "the runtime has refused it before",
    r"PrefetchOperations\.commit: (self\.release\(op\)|return \(\))": "the runtime gives a fetch up before that",
    r"_has_room: break|_not_on_host: return More|_saving: return pause|_evict_next: (self\._world\.offer|return SLICE)":
        "a call runs out of steps just there; tests/core/test_core_steps.py has the trees for that",
    r"World\.(backup|copy): self\._join_backups": "a plan has more backups than one effect may have, or some before "
                                                 "another copy, as in test_core_joined_backups.py",
    r"RoomMaker\._saving: self\._evict_outdone": "a cell that is not worth a copy comes behind one that is",
    r"Listing\.some: self\._run = ": "what was listed leaves before the list is made, as in test_core_surveys.py",
    r"World\.cut_off: left\.append": "a batch fails while a live namespace is listed, as in test_core_surveys.py; "
                                     "the runtime forgets what it lists in the same step",
    r"Transfers\._doom: self\._unparked": "an operation fails above a parked one, as in test_core_write_through.py",
    r"P2c\.choose: return slices\[-1\]": "the newest cell goes again from the queue that the last choice fell on",
}  # fmt: skip
"""Statements that no world reaches, by what they look like in a line of ``Point``, and why."""


@pytest.fixture(autouse=True, scope="module")
def core_with_points() -> Iterator[None]:
    with points():
        yield


@pytest.fixture(scope="module")
def first(core_with_points: None) -> dict[int, str]:
    """The statements that the worlds reach, and the world in which each is reached soonest."""
    found: dict[int, tuple[int, str]] = {}
    for name, play in PLAYS.items():
        injector = Injector()
        assert run(play, injector) == "whole", name
        for point, steps in injector.seen.items():
            found[point] = min(found.get(point, (steps, name)), (steps, name))
    return {point: name for point, (_, name) in sorted(found.items())}


def violations(chosen: Iterable[tuple[int, str]]) -> list[str]:
    """What is wrong after an exception at each of these statements, in its world."""
    wrong = []
    for point, name in chosen:
        injector = Injector(point)
        try:
            verdict = run(PLAYS[name], injector)
        except Exception as error:  # a deadlock, a task that is left, a wrong page
            verdict = f"{type(error).__name__}: {error}"
        if not injector.fired:
            verdict = "it was not reached again"
        if verdict not in ("closed", "whole"):
            wrong.append(f"{POINTS[point]} ({name}): {verdict}")
    return wrong


@pytest.mark.slow(15)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_core_that_raises_at_any_statement_has_changed_nothing_or_closes_the_cache(
    part: int, first: dict[int, str]
) -> None:
    assert violations([(point, name) for point, name in first.items() if point % PARTS == part]) == []


@pytest.mark.slow(8)
def test_without_fail_stop_that_is_found_out(monkeypatch: pytest.MonkeyPatch, first: dict[int, str]) -> None:
    monkeypatch.setattr(Driver, "_break", lambda driver, error: None)
    commits = [(point, name) for point, name in first.items() if POINTS[point].file == "commits.py"]
    assert len(violations(commits[::10])) > 3


def test_every_statement_of_the_core_is_reached_by_a_world_or_it_is_said_why_not(first: dict[int, str]) -> None:
    unreached = [str(point) for number, point in enumerate(POINTS) if number not in first]
    missing = [line for line in unreached if not why(line)]
    assert not missing, "\n".join(missing)
    used = {why(line) for line in unreached}
    assert used == set(UNREACHED), "reasons that nothing needs any more"


def why(line: str) -> str | None:
    """Which entry of ``UNREACHED`` a statement falls under."""
    return next((pattern for pattern in UNREACHED if re.search(pattern, line)), None)


def test_the_core_catches_nothing_so_an_exception_leaves_every_call_of_it_wherever_it_is_raised() -> None:
    """So it is enough to raise at each statement once, and not in each of the calls that run it."""
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
