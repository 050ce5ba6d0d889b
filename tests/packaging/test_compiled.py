"""The compiled core is built as a whole or not at all, and runs only if it was made from the source that lies there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache import Full, compiled, load_config
from tests.stores.server import NowhereRequired

ROOT = Path(__file__).parents[2]
SAYS = "from asynccache import compiled as c; import asynccache.core.world; print(c.CORE, c.WHY, sep=': ')"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """asynccache by itself, with something that passes for a compiled core."""
    ignored = shutil.ignore_patterns("__pycache__", "_compiled")
    shutil.copytree(ROOT / "asynccache", tmp_path / "asynccache", ignore=ignored)
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    folder = tmp_path / Path(compiled.FOLDER).relative_to(ROOT)
    folder.mkdir(parents=True)
    for name in ("asynccache.core.all__mypyc", "asynccache.core.world"):
        (folder / f"{name}{compiled.SUFFIX}").write_bytes(b"no library")
    made_from = compiled.digest(["asynccache.core.world", *compiled.BESIDE], str(tmp_path / "asynccache"))
    (folder / compiled.SOURCE).write_text(f"{made_from} asynccache.core.world\n")
    return tmp_path


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("ASYNCCACHE_PURE", "PYTHONPATH")}
    return subprocess.run([sys.executable, *words], cwd=folder, env={**inherited, **environment}, capture_output=True,
                          text=True, check=False, timeout=60)  # fmt: skip


def build(folder: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    """What building it says, with the C compiler that is never reached, or is no compiler."""
    pytest.importorskip("mypyc")
    done = run(folder, "hatch_build.py", CC=compiler)
    if "headers are not installed" in done.stderr:
        raise NowhereRequired(done.stderr)
    return done


def test_it_is_taken_if_the_source_is_the_same(copy: Path) -> None:
    done = run(copy, "-c", SAYS)
    assert "ImportError" in done.stderr, "what passes for a module was to be loaded"


@pytest.mark.parametrize("module", ["core/world", "core/keys", "checks"])
def test_source_that_was_changed_since_runs_itself(copy: Path, module: str) -> None:
    """Also that of modules whose types the compiled ones rely on."""
    with (copy / f"asynccache/{module}.py").open("a") as file:
        file.write("\n")
    done = run(copy, "-c", SAYS)
    assert done.stdout == "pure: what was compiled was made from another source: make compiled\n", done.stderr


@pytest.mark.parametrize(("value", "pure"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_a_variable_chooses_the_source(copy: Path, value: str, pure: bool) -> None:
    done = run(copy, "-c", SAYS, ASYNCCACHE_PURE=value)
    assert (done.stdout == "pure: ASYNCCACHE_PURE is set\n") == pure


def test_the_variables_of_a_build_are_no_settings() -> None:
    env = {"ASYNCCACHE_PURE": "1", "ASYNCCACHE_COMPILE": "1"}
    assert load_config(env=env, model="m", components=(Full(bytes_per_token=64, device_tokens=160),)).model == "m"


@pytest.mark.parametrize("lacking", ["the folder", "the library", "a module", "what it was made from"])
def test_what_is_not_whole_does_not_run(copy: Path, lacking: str) -> None:
    folder = copy / Path(compiled.FOLDER).relative_to(ROOT)
    if lacking == "the folder":
        shutil.rmtree(folder)
    else:
        names = {"the library": f"asynccache.core.all__mypyc{compiled.SUFFIX}",
                 "a module": f"asynccache.core.world{compiled.SUFFIX}", "what it was made from": compiled.SOURCE}
        (folder / names[lacking]).unlink()
    done = run(copy, "-c", SAYS)
    assert done.stdout.startswith("pure: "), done.stderr


def test_without_mypyc_it_says_so_and_leaves_what_there_is(copy: Path) -> None:
    (copy / "mypyc").mkdir()
    (copy / "mypyc" / "build.py").write_text("raise ImportError('none', name='mypyc')")
    (copy / "mypyc" / "__init__.py").touch()
    before = sorted(copy.rglob("_compiled/**/*"))
    done = run(copy, "hatch_build.py")
    assert done.returncode == 2
    assert "mypyc and setuptools are needed, and mypyc is not installed" in done.stderr
    assert "The pure one works as before" in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(copy.rglob("_compiled/**/*")) == before
    assert run(copy, "-c", SAYS, ASYNCCACHE_PURE="1").returncode == 0


@pytest.mark.slow(20)
@pytest.mark.parametrize(("compiler", "status", "sentence"), [
    ("no-such-compiler", 2, "there is no C compiler: no-such-compiler is not on the path"),
    ("false", 1, "false failed with status 1"),
])  # fmt: skip
def test_without_a_c_compiler_it_says_so_and_leaves_what_there_is(
    copy: Path, compiler: str, status: int, sentence: str
) -> None:
    before = sorted(copy.rglob("_compiled/**/*"))
    done = build(copy, compiler)
    assert done.returncode == status, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(copy.rglob("_compiled/**/*")) == before


@pytest.mark.slow(20)
def test_source_that_mypyc_refuses_is_named(copy: Path) -> None:
    with (copy / "asynccache/core/world.py").open("a") as file:
        file.write("\nWRONG: int = 'text'\n")
    done = build(copy, "true")
    assert done.returncode == 1
    assert "mypyc refuses the core: asynccache/core/world.py:" in done.stderr
