"""A program that cannot start: a failed run where the stores are required, a skip that says why anywhere else. Tests of
this project are run for it as on a bare machine: ``tests.bare``."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import bare
from tests.stores.server import CannotStart, NowhereRequired, path_of, required

REASON = "redis-server is not installed: make stores-install"


def run(folder: Path, part: str, *options: str, **environment: str) -> tuple[int, str]:
    """Status and output of the tests of ``part``, as on a bare machine."""
    words = bare.command([part], options)
    done = subprocess.run(words, cwd=bare.ROOT, env={**bare.environment(folder), **environment}, capture_output=True,
                          text=True, timeout=500, check=False)  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
def test_where_stores_are_required_the_run_fails_and_says_why(tmp_path: Path) -> None:
    status, output = run(tmp_path, "tests/stores/test_sharing.py", "-k", "redis or cluster",
                         ASYNCCACHE_STORES="required")  # fmt: skip
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert REASON in output
    assert "skipped" not in output


@pytest.mark.slow(20)
def test_anywhere_else_tests_of_stores_pass_or_are_skipped_and_the_last_lines_say_why(tmp_path: Path) -> None:
    """The suite that all stores have in common stands for all of them: ``make test-bare`` runs them all."""
    listed = tmp_path / "skipped"
    status, output = run(tmp_path, "tests/stores/test_conformance.py", f"--skipped={listed}")
    assert status == pytest.ExitCode.OK, output
    lines = listed.read_text().splitlines()
    assert "\n".join(lines) in output
    counts = {line.partition(": ")[2]: int(line.split()[1]) for line in lines}
    assert len(counts) == len(lines), "each reason once"
    [skipped] = re.findall(r" passed, (\d+) skipped in ", output.splitlines()[-1])
    assert sum(counts.values()) == int(skipped)
    assert counts[REASON] > 10
    assert counts["libibverbs.so.1 is not installed: make stores-install"] > 10
    assert all(": make " in reason or " install " in reason for reason in counts), counts


@pytest.mark.parametrize(("kind", "needed", "outcome"), [
    (CannotStart, False, "skipped"), (CannotStart, True, "failed"), (NowhereRequired, True, "skipped"),
])  # fmt: skip
def test_a_program_that_cannot_start_is_a_skip_wherever_that_is_found_out(
    kind: type[CannotStart], needed: bool, outcome: str, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("ASYNCCACHE_STORES", "required" if needed else "")

    def find() -> None:
        path_of("no-such-program", install="make it\n  so", missing=kind)

    for when in ("setup", "call", "teardown"):
        call = pytest.CallInfo.from_call(find, when)
        report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
        assert report.outcome == outcome
        assert "no-such-program is not installed: make it" in str(report.longrepr)


def test_every_test_that_looks_for_a_program_is_tried_without_it() -> None:
    looks = re.compile(r"shutil\.which\(|^from tests\.stores\.(server import .*path_of|\w+_server)", re.MULTILINE)
    found = [path for path in (bare.ROOT / "tests").rglob("test_*.py") if looks.search(path.read_text())]
    assert len(found) > 10
    parts = [bare.ROOT / part.partition("::")[0] for part in bare.PARTS]
    assert [path for path in found if not any(path.is_relative_to(part) for part in parts)] == []


@pytest.mark.parametrize("names", [("sh", "no-such-program"), ("no-such-program", "sh"), ("python",)])
def test_a_program_is_found_by_any_of_its_names_and_beside_the_interpreter(names: Sequence[str]) -> None:
    assert os.access(path_of(*names, install=""), os.X_OK)


@pytest.mark.parametrize(("environment", "wanted"), [
    ({"ASYNCCACHE_STORES": "required"}, True), ({"CI": "true"}, True), ({"CI": ""}, False), ({}, False),
    ({"ASYNCCACHE_STORES": "if there"}, False),
])  # fmt: skip
def test_stores_are_required_by_either_variable(
    environment: dict[str, str], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CI", "ASYNCCACHE_STORES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert required() is wanted
