"""The package as it is installed, what importing it loads, which core runs."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import asynccache
from asynccache.extras import BRINGS
from tests.processes import ROOT, program, run

# The package as it is installed: two commands, one torch, plug-ins by entry point, a gate.


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def dry_run(target: str) -> str:
    return program("make", "-n", "--always-make", target, cwd=ROOT).stdout


def test_torch_is_pinned_and_both_commands_use_the_pin() -> None:
    assert re.search(r"^torch==2\.13\.0$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    for target in ("demo", "test"):
        installs = [line for line in dry_run(target).splitlines() if "pip install" in line]
        assert installs
        assert all("-c constraints.txt" in line for line in installs)


def test_the_gate_is_ruff_strict_mypy_contracts_and_every_test(project: dict[str, Any]) -> None:
    steps, beside = dry_run("test"), dry_run("types")
    for tool in ("ruff check", "pytest"):
        assert tool in steps
    for tool in ("mypy", "lint-imports"):
        assert tool in beside
    assert "not slow" not in steps
    assert "not slow" in dry_run("check")
    assert "for part in types test-compiled;" in steps
    assert "for part in types;" in dry_run("check")
    tools = project["tool"]
    assert (tools["mypy"]["strict"], tools["pytest"]["ini_options"]["filterwarnings"]) == (True, ["error"])
    assert "{ make test PYTEST=" in (ROOT / ".ci" / "run").read_text()


def test_backends_are_found_by_entry_point(project: dict[str, Any]) -> None:
    declared = project["project"]["entry-points"]["asynccache.backends"]
    installed = {point.name: point for point in entry_points(group="asynccache.backends")}
    if not installed:
        pytest.skip("asynccache is not installed, only on the path")
    assert installed.keys() >= declared.keys()
    for name in declared:
        assert callable(installed[name].load())


def test_hints_name_what_the_extras_bring(project: dict[str, Any]) -> None:
    """By a command that works in a clone and beside an installed package, which does not name asynccache."""
    wanted = project["project"]["optional-dependencies"]
    assert {extra: list(packages) for extra, packages in BRINGS.items()} == {extra: wanted[extra] for extra in BRINGS}
    folders = (ROOT / name for name in ("asynccache", "backends", "scheduler_shim"))
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    told = [path for path in sources if "pip install 'asynccache" in path.read_text()]
    assert told == [ROOT / "asynccache" / "extras.py"]      # which says why not


# Imports: torch, and whatever else is large, is loaded when it is used, and not when a name is imported.


HEAVY = ("torch", "numpy", "uvloop", "xxhash", "aiofiles", "rich", "cupy", "transformers", "zmq", "prometheus_client")
CONFIG = "asynccache.CacheConfig(model='m', components=(asynccache.Full(bytes_per_token=64, device_tokens=160),))"
LOADED = ("asynccache.load_config(env={}, model='m', "
          "components=(asynccache.Full(bytes_per_token=64, device_tokens=160),))")


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after ``code``."""
    show = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = run("-c", code + show, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


CPU_SECONDS = 0.3
TIMED = "import resource as r, asynccache as a; {}; u = r.getrusage(r.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"


@pytest.mark.slow
@pytest.mark.parametrize("use", ["a", f"a{CONFIG.removeprefix('asynccache')}".replace("asynccache.", "a.")])
def test_importing_it_takes_little(use: str) -> None:
    """CPU time of the whole process, the best of five: what it takes on a machine that has time for it."""
    assert min(float(run("-c", TIMED.format(use), cwd=ROOT).stdout) for _ in range(5)) < CPU_SECONDS


def command(*arguments: str) -> str:
    return (f"from asynccache.cli.main import main\ntry:\n    main({list(arguments)!r})\n"
            "except SystemExit as end:\n    assert not end.code, end.code")


@pytest.mark.slow
@pytest.mark.parametrize("code", [
    *(f"import asynccache\n{use}" for use in ("", CONFIG, LOADED, "dir(asynccache)", "asynccache.ConfigError")),
    *(command(*words.split()) for words in ("--help", "--version", "stress --help", "replay --help", "config schema",
                                            "bench --help")),
])  # fmt: skip
def test_the_package_its_settings_and_commands_that_touch_no_page_load_nothing_heavy(code: str) -> None:
    assert loaded_by(code) == set()


@pytest.mark.slow
def test_a_store_is_looked_at_without_torch(tmp_path: Path) -> None:
    make = (
        "import asyncio\nfrom asynccache.storage import RECORD_SCHEMA, StoreLayout, open_store\n"
        f"url = 'file:{tmp_path}/kv?capacity=64MiB'\n"
        "async def main():\n    await (await open_store(url, StoreLayout({'full': 4096}, RECORD_SCHEMA))).aclose()\n"
        "asyncio.run(main())\n"
    )
    looked = loaded_by(make + command("store", "stat", f"file:{tmp_path}/kv", "--json", "-"))
    assert not looked & {"torch", "numpy", "rich"}


@pytest.mark.slow
def test_a_cache_loads_torch_when_it_is_made_and_its_name_does_not() -> None:
    """Else the tests above could not fail."""
    assert "torch" not in loaded_by("import asynccache\nasynccache.AsyncCache")
    assert "torch" in loaded_by(f"import asynccache\nasynccache.AsyncCache({CONFIG})")


@pytest.mark.slow
def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    for name in asynccache.__all__:
        assert getattr(asynccache, name) is not None
    assert set(dir(asynccache)) == set(asynccache.__all__)
    tree = ast.parse((ROOT / "asynccache" / "__init__.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported >= set(asynccache.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'AsyncCach'"):
        asynccache.AsyncCach  # noqa: B018


# Who installs one extra has what its commands need: nothing that only another extra brings is imported.


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


def hidden_beside(extra: str) -> list[str]:
    """The modules that are not there where only this extra is installed."""
    there = brought_by(extra)
    hidden = {module for module, names in packages_distributions().items()
              if not any(re.sub(r"[-_.]+", "-", name).lower() in there for name in names)}
    assert {"prometheus_client", "uvicorn", "transformers"} <= hidden
    return sorted(hidden)


RUN = "stress --requests 5"
TORCH = r"No module named 'torch'; pip install 'torch>=2.4'"


@pytest.mark.slow(3)
@pytest.mark.parametrize(("lacking", "command", "status", "said"), [
    ("", f"{RUN} --storage file:FOLDER/store", 0, "stress OK"),      # make demo, which README has one do first
    ("", f"{RUN} --serve 0", 2, "--serve: No module named 'uvicorn'; pip install 'prometheus-client>=0.20' 'uvicorn>="),
    ("torch", RUN, 2, f"asynccache: stress needs torch. {TORCH}"),
    ("torch", "replay examples/trace.jsonl", 2, f"asynccache: replay needs torch. {TORCH}"),
    ("torch", "doctor", 0, f"torch     {TORCH} --index-url"),
    ("torch", "plan examples/trace.jsonl", 0, ""),
    ("torch", "bench store --bytes 1MiB --page-sizes 64KiB --repeat 1", 0, ""),
])  # fmt: skip
def test_a_command_does_without_what_it_does_not_need_and_names_what_it_does(
    lacking: str, command: str, status: int, said: str, tmp_path: Path
) -> None:
    """Where only the extra ``cli`` is installed, or all but torch."""
    hiding = f"NAMES = {[lacking] if lacking else hidden_beside('cli')!r}\n{HIDING}"
    done = run("-c", hiding, *command.replace("FOLDER", str(tmp_path)).split(), cwd=ROOT)
    assert (done.returncode, said in done.stdout + done.stderr, "bug" in done.stderr) == (status, True, False), done
    assert command != "doctor" or max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow(3)
def test_a_cache_without_torch_says_what_to_install() -> None:
    asks = (f"NAMES = ['torch']\n{HIDING.partition('sys.argv')[0]}\n"
            "import asyncio, asynccache\nfrom asynccache import AsyncCache, CacheConfig, Full\n"
            "from asynccache.events import Notice, Subscriber\nfrom asynccache.storage import Pages\n"
            "config = CacheConfig(model='m', components=[Full(bytes_per_token=16, device_tokens=64)])\n"
            "async def main():\n    async with AsyncCache(config):\n        pass\n"
            "for make in (lambda: asyncio.run(main()), lambda: asynccache.DevicePool):\n"
            "    try:\n        make()\n    except ModuleNotFoundError as error:\n        print(error)\n")
    done = run("-c", asks)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("No module named 'torch'; pip install 'torch>=2.4' --index-url ") for line in lines)
