"""``pytest --device cuda:0`` runs every test that makes a CPU device on a GPU; ``--device simulated-cuda`` on the CUDA
device with a simulated driver, which needs no GPU and looks for races besides.

``pytest --core compiled`` runs every test on the compiled core; without it, all of them run on the source, whatever is
compiled. Tests that change what is inside the core are marked ``source``: they are not run on the compiled core.

With ``ASYNCCACHE_GPU=required`` a test that is marked ``gpu`` fails where it would be skipped.

A test that needs a program is skipped where that cannot start, and the last lines say how many were skipped for what
reason. ``--skipped FILE`` writes these lines into a file, too.

With ``--device``, the name ``CpuDevice`` stands for the other device, wherever a test or the cache itself makes one.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.processes import Command, Done
from tests.stores.server import CannotStart, NowhereRequired, required
from tests.workers import dealt

# A folder's own conftest.py may import asynccache before options are read.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["ASYNCCACHE_PURE"] = "01"["--core compiled" not in " ".join(sys.argv).replace("=", " ")]
_FILE = pytest.StashKey[Path]()
BOTH_LOOPS = (
    "runtime", "worker", "shim", "stores/test_conformance.py", "stores/test_redis_connection.py",
)  # fmt: skip
"""Folders and files whose asynchronous tests run on asyncio and on uvloop: the runtime's, and code that uses sockets
itself or is called back by a library's threads. All others run on asyncio."""
SLOW_FOLDERS = ("engine", "examples")
"""Folders of which every test is slow: what they import (transformers, openai) takes seconds of each worker's time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", metavar="cpu|cuda:N|simulated-cuda",
                     help="what stands behind the devices that tests make")  # fmt: skip
    parser.addoption("--core", default="pure", choices=("pure", "compiled"), help="which core runs")
    parser.addoption("--skipped", type=Path, metavar="FILE", help="where it is written how many tests were skipped")


def pytest_configure(config: pytest.Config) -> None:
    settings.register_profile("gate", derandomize=True, database=None)     # make soak has seeds that nobody has tried
    settings.load_profile("gate")
    _choose_core(config.getoption("--core"))
    name: str = config.getoption("--device")
    if name != "cpu":
        from asynccache.errors import ConfigError
        from asynccache.memory import cpu
        from tests.cuda.instead import device_class

        try:
            setattr(cpu, "CpuDevice", device_class(name))  # noqa: B010  before anybody imports it
        except ConfigError as error:
            raise pytest.UsageError(f"--device {name}: {error}") from None


def _choose_core(name: str) -> None:
    """Before anybody imports asynccache, here and in all processes that tests start."""
    os.environ["ASYNCCACHE_PURE"] = "01"[name == "pure"]
    from asynccache import compiled

    if name != compiled.CORE:
        raise pytest.UsageError(f"--core {name}: {compiled.WHY}; make compiled builds it")


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    where = item.path.relative_to(Path(__file__).parent)
    if where.parts[0] not in BOTH_LOOPS and where.as_posix() not in BOTH_LOOPS:
        return {"asyncio": asyncio.new_event_loop}
    import uvloop

    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``make check`` does not even import what lies in these folders."""
    unwanted = "not slow" in config.getoption("markexpr") and _folder_of(collection_path) in SLOW_FOLDERS
    return True if unwanted else None


def pytest_itemcollected(item: pytest.Item) -> None:
    if _folder_of(item.path) in SLOW_FOLDERS and not item.get_closest_marker("slow"):
        item.add_marker(pytest.mark.slow(0.5))


def _folder_of(path: Path) -> str:
    """The folder of ``tests`` that ``path`` is, or lies in; else an empty text."""
    here = Path(__file__).parent
    return path.relative_to(here).parts[0] if path != here and path.is_relative_to(here) else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What is there when the tests of another file begin stays: the garbage collector need not look at it again. After
    a few thousand tests it took half a second to look at everything."""
    if item.path != item.session.stash.get(_FILE, None):
        item.session.stash[_FILE] = item.path
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)                         # after -m and -k have left out what is not wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the slow tests, so that none is left for the end, when the others have nothing to do."""
    if config.getoption("--core") == "compiled":
        left_out = [item for item in items if item.get_closest_marker("source")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("source")]
    workers: int = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers > 1:
        items[:] = dealt(items, _seconds, lambda item: item.path, workers)


def _seconds(item: pytest.Item) -> float:
    """What ``slow(seconds)`` says of a test; a second where it gives no number, and 0 for a test that is not slow."""
    mark = item.get_closest_marker("slow")
    return 0.0 if mark is None else mark.args[0] if mark.args else 1.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A program that cannot start is a skip, wherever in a test or a fixture that is found out; where the stores are
    required, it stays a failure. Where the GPU is required, no test that needs one is skipped."""
    error = call.excinfo.value if call.excinfo is not None else None
    required_gpu = os.environ.get("ASYNCCACHE_GPU") == "required" and item.get_closest_marker("gpu")
    if isinstance(error, pytest.skip.Exception) and required_gpu:
        failed = partial(pytest.fail, f"ASYNCCACHE_GPU=required, and yet: {error}", pytrace=False)
        call.excinfo = pytest.CallInfo.from_call(failed, call.when).excinfo
    if isinstance(error, NowhereRequired) or (isinstance(error, CannotStart) and not required()):
        reason = " ".join(str(error).split())
        call.excinfo = pytest.CallInfo.from_call(partial(pytest.skip, reason), call.when).excinfo


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How many tests were skipped for what reason. The reason ends with the command that brings them, if there is one.
    A file that was skipped as a whole counts as one test."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", []) if isinstance(report.longrepr, tuple)
    )  # fmt: skip
    lines = [f"skipped {count} test{'s' * (count > 1)}: {reason}" for reason, count in reasons.most_common()]
    for line in lines:
        terminalreporter.write_line(line)
    if (file := config.getoption("--skipped")) is not None:
        file.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """``asynccache WORD...`` in this process, which ends with ``status``; what it printed."""
    from asynccache.cli.main import main

    def called(*words: object, status: int = 0) -> Done:
        capsys.readouterr()
        given = [str(word) for word in words]
        try:
            found = main(given)
        except SystemExit as end:                      # of the parser
            found = int(end.code or 0)
        done = Done(given, found, *capsys.readouterr())
        assert found == status, done
        return done

    return called


@pytest.fixture
def own_signals() -> Iterator[None]:
    """For what owns the signals of its process, which here is the process of all tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)    # a shell's background job has it ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _owners_of_tree_locks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Core calls that may split nodes are made by the task that holds the tree lock. Compiled classes cannot be
    changed, so only the source is watched."""
    if request.config.getoption("--core") == "compiled" or "asynccache.runtime.driver" not in sys.modules:
        yield
        return
    from tests.lock_owner import owners_checked

    with owners_checked():
        yield


@pytest.fixture(autouse=True)
def _no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """The simulated drivers of this test saw nothing wrong."""
    yield
    if request.config.getoption("--device") == "simulated-cuda":
        from tests.cuda import instead

        problems: list[Any] = instead.end_drivers()
        assert problems == []
