"""A store that cannot start: a failed run where the stores are required, a skip that says why anywhere else. Tests of
this project are run for it in a process whose PATH leads nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stores.redis_server import RedisServer
from tests.stores.server import required

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
REASON = "redis-server is not installed: apt-get install redis-server"


def run_without_redis(folder: Path, **environment: str) -> tuple[int, str]:
    """Status and output of tests that need a server and a cluster."""
    if shutil.which(RedisServer.program, path=str(Path(sys.executable).parent)):
        pytest.skip("redis-server lies beside the interpreter, where it is always found")
    kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ASYNCCACHE_STORES")}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/stores/test_sharing.py",
               "-k", "redis or cluster"]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env={**kept, "PATH": str(folder), **environment}, capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip
    return done.returncode, done.stdout


def test_where_stores_are_required_the_run_fails_and_says_why(tmp_path: Path) -> None:
    status, output = run_without_redis(tmp_path, ASYNCCACHE_STORES="required")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert REASON in output
    assert "skipped" not in output


def test_anywhere_else_they_are_skipped_and_it_is_said_why(tmp_path: Path) -> None:
    status, output = run_without_redis(tmp_path)
    assert status == pytest.ExitCode.OK, output
    assert "SKIPPED" in output
    assert REASON in output
    assert not any(word in output for word in ("passed", "failed", "error"))


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
