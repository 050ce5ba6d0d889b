"""The package's names: each is the same whatever was imported before it, and without transformers each says what to
install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import asynccache_hf
import pytest
import transformers
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
(WANTED,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, with our packages to import."""
    path = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'scheduler_shim')]!r}\n"
    return subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, timeout=120)


def test_no_name_is_hidden_by_a_module() -> None:
    """A module that is imported becomes an attribute of its package, and would be found before a name like it."""
    folder = ROOT / "scheduler_shim" / "asynccache_hf"
    assert not {file.stem for file in folder.glob("*.py")} & set(asynccache_hf.__all__)
    with pytest.raises(AttributeError, match="'asynccache_hf' has no attribute 'nothing'"):
        _ = asynccache_hf.nothing


def test_without_transformers_a_name_says_what_brings_it() -> None:
    """By a command that works beside an installed package and in a clone."""
    done = python("sys.modules['transformers'] = None; import asynccache_hf; print('imported'); asynccache_hf.describe")
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1].endswith(f"asynccache_hf needs transformers: pip install '{WANTED}'")


def test_with_an_older_transformers_a_name_says_which_one_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.22, the one before the oldest that is named, has no ``DummyLayer``."""
    monkeypatch.delattr(transformers.cache_utils, "DummyLayer")
    monkeypatch.delitem(sys.modules, "asynccache_hf.description", raising=False)
    monkeypatch.delitem(vars(asynccache_hf), "describe", raising=False)
    with pytest.raises(ImportError, match="cannot import name 'DummyLayer'") as told:
        _ = asynccache_hf.describe
    assert str(told.value).endswith(f"asynccache_hf needs another version of transformers: pip install '{WANTED}'")


def test_without_transformers_own_continuous_batching_everything_is_there() -> None:
    """Nothing of it is used, so no later version of it breaks anything."""
    folder = ROOT / "scheduler_shim" / "asynccache_hf"
    assert not [file.name for file in folder.glob("*.py") if "continuous_batching" in file.read_text()]


def test_a_module_of_transformers_that_is_not_there_is_another_version() -> None:
    """transformers itself is installed."""
    done = python("sys.modules['transformers.cache_utils'] = None; import asynccache_hf; asynccache_hf.describe")
    assert done.stderr.splitlines()[-1].endswith(f"needs another version of transformers: pip install '{WANTED}'")


def test_the_oldest_version_that_is_named_is_the_one_of_the_gate() -> None:
    """And no version is too new: a model's trial decides (``make test-transformers`` tries the newest)."""
    named = Requirement(WANTED).specifier
    pins = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("transformers=="))
    gate = next(pins).partition("==")[2]
    major, minor = (int(part) for part in gate.split(".")[:2])
    assert named.contains(gate)
    assert not named.contains(f"{major}.{minor - 1}.9")
    assert named.contains("99.0.0")
