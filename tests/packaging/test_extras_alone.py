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


def without_torch(*command: str) -> subprocess.CompletedProcess[str]:
    """A command of ours where torch is not installed."""
    program = f"NAMES = ['torch']\n{HIDING}"
    return subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120,
                          check=False)


@pytest.mark.parametrize("command", [["stress", "--requests", "1"], ["replay", "examples/trace.jsonl"]])
def test_a_missing_torch_is_named_as_any_missing_extra_is(command: list[str]) -> None:
    done = without_torch(*command)
    assert done.returncode == 2
    said = f"asynccache: {command[0]} needs torch. No module named 'torch'; pip install 'torch>="
    assert done.stderr.startswith(said)
    assert "bug" not in done.stderr


def test_doctor_says_how_torch_is_installed() -> None:
    done = without_torch("doctor")
    assert done.returncode == 0, done.stderr
    assert "torch     No module named 'torch'; pip install 'torch>=2.4' --index-url" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", [
    ["plan", "examples/trace.jsonl"], ["config", "schema"], ["bench", "store", "--bytes", "1MiB", "--page-sizes",
                                                             "64KiB", "--repeat", "1"],
])  # fmt: skip
def test_what_needs_no_torch_does_without(command: list[str]) -> None:
    done = without_torch(*command)
    assert done.returncode == 0, done.stderr


def test_a_cache_without_torch_says_what_to_install() -> None:
    program = (f"NAMES = ['torch']\n{HIDING.partition('sys.argv')[0]}\n"
               "import asyncio, asynccache\nfrom asynccache import AsyncCache, CacheConfig, Full\n"
               "from asynccache.events import Notice, Subscriber\nfrom asynccache.storage import Pages\n"
               "config = CacheConfig(model='m', components=[Full(bytes_per_token=16, device_tokens=64)])\n"
               "async def main():\n    async with AsyncCache(config):\n        pass\n"
               "for make in (lambda: asyncio.run(main()), lambda: asynccache.DevicePool):\n"
               "    try:\n        make()\n    except ModuleNotFoundError as error:\n        print(error)\n")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("No module named 'torch'; pip install 'torch>=2.4' --index-url ") for line in lines)
