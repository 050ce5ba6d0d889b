"""The package as it is installed: two commands, one torch, plug-ins by entry point, a gate that is strict."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from asynccache.extras import BRINGS
from asynccache.version import VERSION

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def dry_run(target: str) -> str:
    made = subprocess.run(["make", "-n", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True)
    return made.stdout


def test_torch_is_pinned_and_both_commands_use_the_pin() -> None:
    assert re.search(r"^torch==2\.13\.0$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for target in ("demo", "test"):
        installs = [line for line in dry_run(target).splitlines() if "pip install" in line]
        assert installs
        assert all("-c constraints.txt" in line for line in installs)


def test_the_gate_is_ruff_mypy_contracts_and_every_test() -> None:
    steps, beside = dry_run("test"), dry_run("types")
    for tool in ("ruff check", "pytest"):
        assert tool in steps
    for tool in ("mypy", "lint-imports"):
        assert tool in beside
    assert "not slow" not in steps
    assert "not slow" in dry_run("check")
    assert "for part in types test-compiled;" in steps
    assert "for part in types;" in dry_run("check")


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "{ make test PYTEST=" in script
    assert "make test" in (ROOT / "README.md").read_text()
    assert "make demo" in (ROOT / "README.md").read_text()


def test_the_gate_is_strict(project: dict[str, Any]) -> None:
    assert project["tool"]["mypy"]["strict"] is True
    assert project["tool"]["pytest"]["ini_options"]["filterwarnings"] == ["error"]
    assert project["tool"]["pytest"]["ini_options"]["asyncio_mode"] == "auto"


def test_backends_are_found_by_entry_point(project: dict[str, Any]) -> None:
    declared = project["project"]["entry-points"]["asynccache.backends"]
    installed = {point.name: point for point in entry_points(group="asynccache.backends")}
    if not installed:
        pytest.skip("asynccache is not installed, only on the path")
    assert installed.keys() >= declared.keys()
    for name in declared:
        assert callable(installed[name].load())


def test_hints_name_what_the_extras_bring() -> None:
    """By a command that works in a clone and beside an installed package, which does not name asynccache."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in BRINGS.items()} == {extra: wanted[extra] for extra in BRINGS}
    folders = (ROOT / name for name in ("asynccache", "backends", "scheduler_shim"))
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    told = [path for path in sources if "pip install 'asynccache" in path.read_text()]
    assert told == [ROOT / "asynccache" / "extras.py"]      # which says why not


def test_the_package_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "asynccache", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout == f"asynccache {VERSION}, pure core\n"
