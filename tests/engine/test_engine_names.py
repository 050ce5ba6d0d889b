"""The package's names: each is the same whatever was imported before it, and without transformers each says what to
install."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import asynccache_hf
import pytest

ROOT = Path(__file__).parents[2]


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
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]
    done = python("sys.modules['transformers'] = None; import asynccache_hf; print('imported'); asynccache_hf.describe")
    assert done.stdout == "imported\n"
    assert done.stderr.splitlines()[-1].endswith(f"asynccache_hf needs transformers: pip install '{wanted[0]}'")
