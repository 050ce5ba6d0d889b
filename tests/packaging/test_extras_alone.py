"""Who installs one extra has what its commands need: nothing that only another extra brings is imported."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow(3)

HIDING = """
import runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.argv = ["asynccache", *sys.argv[1:]]
runpy.run_module("asynccache", run_name="__main__")
"""


def brought_by(extra: str) -> set[str]:
    """The names of all distributions that ``pip install asynccache[extra]`` brings."""
    found, left = set[str](), [("asynccache", frozenset({extra}))]
    while left:
        name, extras = left.pop()
        found.add(name)
        try:
            needed = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        for one in needed:
            wanted = one.marker is None or any(one.marker.evaluate({"extra": each}) for each in {"", *extras})
            if wanted and (other := re.sub(r"[-_.]+", "-", one.name).lower()) not in found:
                left.append((other, frozenset(one.extras)))
    return found


def without_others(extra: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of ours where only this extra is installed."""
    there = brought_by(extra)
    hidden = {module for module, names in packages_distributions().items()
              if not any(re.sub(r"[-_.]+", "-", name).lower() in there for name in names)}
    assert {"prometheus_client", "uvicorn", "transformers"} <= hidden
    program = f"NAMES = {sorted(hidden)!r}\n{HIDING}"
    return subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120,
                          check=False)


def test_the_demo_needs_the_extra_cli_alone(tmp_path: Path) -> None:
    """``make demo`` installs nothing else, and is the first thing that README has one do."""
    done = without_others("cli", "stress", "--requests", "5", "--storage", f"file:{tmp_path}/store")
    assert done.returncode == 0, done.stderr
    assert "stress OK" in done.stdout


def test_serving_where_nothing_can_serve_is_a_sentence() -> None:
    done = without_others("cli", "stress", "--requests", "5", "--serve", "0")
    assert done.returncode == 2
    assert "--serve: No module named 'uvicorn'; pip install 'prometheus-client>=0.20' 'uvicorn>=0.34'" in done.stderr
