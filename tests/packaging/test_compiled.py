"""The compiled core is built as a whole or not at all, and runs only if it was made from the source that lies there.
Which core runs is told by the metrics and by ``asynccache doctor``; ``benchmarks/tree.py`` measures both where there
are both. ``asynccache --version`` and the other commands: ``tests/cli/test_cli_main.py``.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asynccache import AsyncCache, Full, __version__, compiled, load_config
from tests import processes
from tests.processes import ROOT, Command, Done
from tests.runtime.runtime_kit import settings
from tests.stores.server import NowhereRequired

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


def run(folder: Path, *words: str, **environment: str) -> Done:
    return processes.run(*words, cwd=folder, env={"ASYNCCACHE_PURE": "", "PYTHONPATH": "", **environment})


def build(folder: Path, compiler: str) -> Done:
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


def refused(copy: Path, build: Callable[[], Done], status: int, sentence: str) -> str:
    """What it says when it does not build, and leaves what there is."""
    before = sorted(copy.rglob("_compiled/**/*"))
    done = build()
    assert (done.returncode, sentence in done.stderr, "Traceback" in done.stderr) == (status, True, False), done.stderr
    assert sorted(copy.rglob("_compiled/**/*")) == before
    return done.stderr


def test_without_mypyc_it_says_so_and_leaves_what_there_is(copy: Path) -> None:
    (copy / "mypyc").mkdir()
    (copy / "mypyc" / "build.py").write_text("raise ImportError('none', name='mypyc')")
    (copy / "mypyc" / "__init__.py").touch()
    said = "mypyc and setuptools are needed, and mypyc is not installed"
    assert "The pure one works as before" in refused(copy, lambda: run(copy, "hatch_build.py"), 2, said)
    assert run(copy, "-c", SAYS, ASYNCCACHE_PURE="1").returncode == 0


@pytest.mark.slow(20)
@pytest.mark.parametrize(("compiler", "status", "sentence"), [
    ("no-such-compiler", 2, "there is no C compiler: no-such-compiler is not on the path"),
    ("false", 1, "false failed with status 1"),
])  # fmt: skip
def test_without_a_c_compiler_it_says_so_and_leaves_what_there_is(
    copy: Path, compiler: str, status: int, sentence: str
) -> None:
    assert refused(copy, lambda: build(copy, compiler), status, sentence)


@pytest.mark.slow(20)
def test_source_that_mypyc_refuses_is_named(copy: Path) -> None:
    with (copy / "asynccache/core/world.py").open("a") as file:
        file.write("\nWRONG: int = 'text'\n")
    done = build(copy, "true")
    assert done.returncode == 1
    assert "mypyc refuses the core: asynccache/core/world.py:" in done.stderr


# which core runs


FEW = f"""\
import sys
sys.path[:0] = [{str(ROOT)!r}]
from benchmarks import tree_calls
tree_calls.PROMPTS, tree_calls.CONVERSATIONS, tree_calls.EVICTED = 4, 2, 64
tree_calls.CONTINUATIONS = tree_calls.TURNS = 2
tree_calls.MEMORY_NODES = 400
from benchmarks import tree
"""
"""The command with little to measure: the process that it starts for the other core is this one, too."""


async def test_the_metrics_say_which_core_runs(request: pytest.FixtureRequest) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    from asynccache.metrics import CacheCollector

    registry = prometheus.CollectorRegistry()
    async with AsyncCache(settings()) as cache:
        registry.register(CacheCollector(cache, name="c"))
        lines = prometheus.generate_latest(registry).decode().splitlines()
    core = request.config.getoption("--core")
    assert f'asynccache_build_info{{cache="c",core="{core}",version="{__version__}"}} 1.0' in lines


def test_doctor_says_which_core_runs_and_why(request: pytest.FixtureRequest, command: Command) -> None:
    report = json.loads(command("doctor", "--json").stdout)
    assert report["core"] == request.config.getoption("--core") == compiled.CORE
    assert report["core_why"] == ("ASYNCCACHE_PURE is set" if compiled.CORE == "pure" else None)
    assert compiled.CORE in command("doctor").stdout


@pytest.mark.slow(5)
def test_the_tree_is_measured_with_both_cores_side_by_side(tmp_path: Path) -> None:
    told = run(ROOT, "-c", SAYS).stdout.strip()
    if not told.startswith("compiled"):
        pytest.skip(f"there is no compiled core to measure: {told}")
    other = tmp_path / "python"
    started = "assert sys.argv[1:3] == ['-m', 'benchmarks.tree']\nsys.exit(tree.main(sys.argv[3:]))\n"
    other.write_text(f"#!{sys.executable}\n{FEW}{started}")
    other.chmod(0o755)
    measure = f"sys.executable = {str(other)!r}\nsys.exit(tree.main(sys.argv[1:]))"
    done = run(ROOT, "-c", FEW + measure, "cores", "--shapes", "0", "--json", str(tmp_path / "tree.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    cores = json.loads((tmp_path / "tree.json").read_text())["cores"]
    ((shape, operations),) = cores["compiled"].items()
    lines = done.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.split() == ["compiled", "pure"]]
    for row, (operation, found) in zip(lines[at + 1 :], operations.items(), strict=False):
        pure = cores["pure"][shape][operation]["cpu"]["p50"]
        assert [float(one) for one in row.split(found["what"][:30])[1].split()[-2:]] == [
            pytest.approx(p50, rel=0.02, abs=0.06) for p50 in (found["cpu"]["p50"], pure)]
