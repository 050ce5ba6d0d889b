"""The gate itself: every core has its share of the slow tests, what is expensive is made once, a campaign tells what it
found, and CI ends with the summary of the tests whatever happened beside them."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.conftest import SLOW_FOLDERS, pytest_ignore_collect
from tests.processes import ROOT, program
from tests.soak import campaigns
from tests.workers import LONG, dealt, made_once

# the order of tests


class Job(NamedTuple):
    name: int
    file: int
    seconds: float


def deal(tests: list[Job], workers: int) -> list[Job]:
    return dealt(tests, lambda test: test.seconds, lambda test: test.file, workers)


def shares(order: list[Job], workers: int) -> list[list[Job]]:
    """What ``--dist worksteal`` gives each worker at the beginning."""
    left, found = list(order), []
    for worker in range(workers):
        count = len(left) // (workers - worker)
        found.append(left[:count])
        del left[:count]
    return found


def seconds(tests: list[Job]) -> float:
    return sum(test.seconds for test in tests)


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_every_worker_begins_with_its_share_of_the_slow_tests(workers: int) -> None:
    random = Random(workers)
    tests = [Job(i, i // 10, random.choice([0.0] * 20 + [1.0, 1.0, 20.0, 45.0])) for i in range(2000)]
    order = deal(tests, workers)
    assert sorted(order) == tests
    given = shares(order, workers)
    for share in given:
        slow = [test for test in share if test.seconds]
        assert share[: len(slow)] == slow
        assert seconds(share) == pytest.approx(seconds(tests) / workers, abs=50)
        assert max(slow[: max(1, len(slow) // 4)], key=lambda test: test.seconds).seconds == 45.0
    ordinary = [test for test in order if not test.seconds]
    assert ordinary == [test for test in tests if not test.seconds]


def test_slow_tests_of_a_file_stay_together_and_a_long_one_goes_by_itself() -> None:
    tests = [Job(0, 0, 1.0), Job(1, 1, 1.0), Job(2, 0, 1.0), Job(3, 1, 1.0), Job(4, 0, LONG + 1), Job(5, 2, 0.0)]
    assert [test.name for test in deal(tests, 2)] == [4, 5, 0, 2, 1, 3]


# folders that are slow


@pytest.mark.parametrize("name", SLOW_FOLDERS)
def test_only_a_run_that_wants_slow_tests_imports_their_folders(name: str) -> None:
    def ignored(path: Path, marks: str) -> bool | None:
        config: Any = SimpleNamespace(getoption={"markexpr": marks}.__getitem__)
        return pytest_ignore_collect(path, config)

    folder = ROOT / "tests" / name
    assert list(folder.glob("test_*.py"))
    for path in (folder, *folder.glob("test_*.py")):
        assert ignored(path, "not slow and not soak")
        assert ignored(path, "not soak") is ignored(path, "") is None
    for path in (ROOT, ROOT / "tests", ROOT / "tests" / "core", ROOT / "benchmarks" / name):
        assert ignored(path, "not slow and not soak") is None


def test_every_test_of_a_slow_folder_is_slow(request: pytest.FixtureRequest) -> None:
    folders = [ROOT / "tests" / name for name in SLOW_FOLDERS]
    for item in request.session.items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            assert item.get_closest_marker("slow"), item.nodeid


# what is made once


def test_what_is_made_once_is_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "file").write_text("whole")

    found: list[str] = []
    name = f"once-{os.getpid()}"
    tmp_path_factory.getbasetemp()                     # processes do not race to choose theirs, threads would

    def work() -> None:
        found.append((made_once(tmp_path_factory, name, make) / "file").read_text())

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == ["whole"] * 4
    assert len(made) == 1


def test_what_could_not_be_made_is_tried_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = f"again-{os.getpid()}"

    def half(folder: Path) -> None:
        (folder / "rubbish").touch()
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        made_once(tmp_path_factory, name, half)
    folder = made_once(tmp_path_factory, name, lambda folder: (folder / "file").touch())
    assert [path.name for path in folder.iterdir()] == ["file"]


# campaigns


def test_a_failure_is_told_with_what_plays_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(seed: int) -> None:
        raise AssertionError(f"wrong with {seed}")

    monkeypatch.setitem(campaigns.CAMPAIGNS, "core", breaks)
    assert campaigns.main(["--only", "core", "--seed", "77", "--once"]) == 1
    said = capsys.readouterr().out
    assert "AssertionError: wrong with 77" in said
    assert "again: python -m tests.soak.campaigns --only core --seed 77 --once" in said
    monkeypatch.setitem(campaigns.CAMPAIGNS, "core", lambda seed: None)
    assert campaigns.main(["--only", "core", "--seed", "77", "--once"]) == 0
    assert capsys.readouterr().out == "core, seed 77: right\n"


def test_a_worker_plays_every_campaign_in_turn_and_ends_when_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, played = [0.0], list[tuple[str, int]]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for name in ("core", "worlds"):
        def play(seed: int, name: str = name) -> None:
            now[0] += 1.0
            played.append((name, seed))

        monkeypatch.setitem(campaigns.CAMPAIGNS, name, play)
    news: SimpleQueue[Any] = SimpleQueue()
    campaigns.work(1, ["core", "worlds"], 5, 6.0, news)
    assert [name for name, _ in played] == ["worlds", "core"] * 3
    assert len({seed for _, seed in played}) == 6
    told = [news.get() for _ in range(13)]
    assert told[-1] == (1, None)
    assert [each.seed for _, each in told[:-1:2]] == [seed for _, seed in played]


def test_a_campaign_plays_what_is_right() -> None:
    campaigns.CAMPAIGNS["worlds"](3)
    campaigns.CAMPAIGNS["file-store"](3)


# CI

MAKE = """#!/bin/sh
case "$1" in
    test-bare) echo '5 passed in 7.77s'; exit $BARE ;;
    stores-install) echo 'a server is installed' ;;
    test) echo 'skipped 1 test: no tea' >build/skipped
        echo 'a dot'; cat build/skipped; echo '3 passed, 1 skipped in 0.01s'; cat build/skipped; exit $TESTS ;;
    build/kernels/.installed) exit $DOWNLOAD ;;
    test-kernels) echo '2 passed in 9.99s'; exit $KERNELS ;;
    build/vllm/.installed) exit $NO_VLLM ;;
    test-vllm-tier) echo '4 passed in 8.88s'; exit $TIER ;;
esac
"""


@pytest.mark.parametrize(("bad", "status"), [
    ("", 0), ("BARE", 1), ("TESTS", 1), ("KERNELS", 1), ("DOWNLOAD", 0), ("NO_VLLM", 0), ("TIER", 1), ("TIME", 0),
])  # fmt: skip
def test_ci_ends_with_the_summary_of_the_tests(bad: str, status: int, tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("make", MAKE), ("chromium", "#!/bin/sh\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = Path(shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci"))
    parts = ("BARE", "TESTS", "DOWNLOAD", "KERNELS", "NO_VLLM", "TIER")
    done = program("sh", script, env={
        **{name: str(int(name == bad)) for name in parts}, "PATH": f"{programs}:{os.environ['PATH']}",
        "CI_SECONDS": "300" if bad == "TIME" else "1700",
    })  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2:] == ["skipped 1 test: no tea", "3 passed, 1 skipped in 0.01s"]
    assert lines.index("5 passed in 7.77s") < lines.index("a server is installed") < lines.index("a dot")
    assert ("tests failed as on a bare machine" in done.stdout) == (bad == "BARE")
    assert ("2 passed in 9.99s" in lines) == (bad != "DOWNLOAD")
    assert ("the CUDA kernel was not compiled" in done.stdout) == (bad == "DOWNLOAD")
    untried = bad in ("NO_VLLM", "TIME")
    assert ("4 passed in 8.88s" in lines) == (not untried)
    assert ("our tier was not tried under vLLM" in done.stdout) == untried


def test_the_last_lines_of_the_gate_say_what_was_skipped(tmp_path: Path) -> None:
    """Below what runs beside the tests, and nothing of an earlier run."""
    beside = "aside:\n\techo the other part\nprobe:\n\t$(call beside,aside,not soak)\n"
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\n{beside}")
    said = "skipped 2 tests: redis-server is not installed: make stores-install"
    for lines, last in ((f"{said}\\n", said), ("", "aside: the other part")):
        settings = [f"PYTEST=sh -c 'test ! -e build/skipped && printf \"{lines}\" >build/skipped'", "SPREAD="]
        done = program("make", "-s", "-C", tmp_path, "probe", *settings)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == last


@pytest.mark.parametrize(("tests", "again", "status"), [
    (0, "false", 0), (1, "true", 0), (1, "false", 1), (2, "true", 1), (5, "true", 1),
])  # fmt: skip
def test_only_tests_that_failed_may_be_tried_again(tests: int, again: str, status: int, tmp_path: Path) -> None:
    """Not a run that was interrupted, broke, or found no tests."""
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nprobe:\n\t$(call beside,,not soak)\n")
    settings = [f"PYTEST=sh -c 'exit {tests}'", f"AGAIN={again}", "SPREAD="]
    done = program("make", "-C", tmp_path, "probe", *settings)
    assert (done.returncode != 0) == bool(status), done.stdout + done.stderr
