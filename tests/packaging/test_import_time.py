"""Imports: torch, and whatever else is large, is loaded when it is used, and not when a name is imported."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import asynccache

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "uvloop", "xxhash", "aiofiles", "rich", "cupy", "transformers", "zmq", "prometheus_client")
CONFIG = "asynccache.CacheConfig(model='m', components=(asynccache.Full(bytes_per_token=64, device_tokens=160),))"
LOADED = ("asynccache.load_config(env={}, model='m', "
          "components=(asynccache.Full(bytes_per_token=64, device_tokens=160),))")


def loaded_by(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after ``code``."""
    show = f"\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code + show], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize("code", ["", CONFIG, LOADED, "dir(asynccache)", "asynccache.ConfigError"])
def test_the_package_and_its_settings_load_nothing_heavy(code: str) -> None:
    assert loaded_by(f"import asynccache\n{code}") == set()


CPU_SECONDS = 0.3
TIMED = "import resource as r, asynccache as a; {}; u = r.getrusage(r.RUSAGE_SELF); print(u.ru_utime + u.ru_stime)"


@pytest.mark.parametrize("use", ["a", f"a{CONFIG.removeprefix('asynccache')}".replace("asynccache.", "a.")])
def test_importing_it_takes_little(use: str) -> None:
    """CPU time of the whole process, the best of five: what it takes on a machine that has time for it."""
    times = [float(subprocess.run([sys.executable, "-c", TIMED.format(use)], cwd=ROOT, capture_output=True, text=True,
                                  check=True).stdout) for _ in range(5)]
    assert min(times) < CPU_SECONDS


def command(*arguments: str) -> str:
    return (f"from asynccache.cli.main import main\ntry:\n    main({list(arguments)!r})\n"
            "except SystemExit as end:\n    assert not end.code, end.code")


@pytest.mark.parametrize("arguments", [
    ("--help",), ("--version",), ("stress", "--help"), ("replay", "--help"), ("config", "schema"), ("bench", "--help"),
])
def test_commands_that_touch_no_page_load_nothing_heavy(arguments: tuple[str, ...]) -> None:
    assert loaded_by(command(*arguments)) == set()


def test_a_store_is_looked_at_without_torch(tmp_path: Path) -> None:
    make = (
        "import asyncio\nfrom asynccache.storage import RECORD_SCHEMA, StoreLayout, open_store\n"
        f"url = 'file:{tmp_path}/kv?capacity=64MiB'\n"
        "async def main():\n    await (await open_store(url, StoreLayout({'full': 4096}, RECORD_SCHEMA))).aclose()\n"
        "asyncio.run(main())\n"
    )
    looked = loaded_by(make + command("store", "stat", f"file:{tmp_path}/kv", "--json", "-"))
    assert not looked & {"torch", "numpy", "rich"}


def test_the_tree_is_measured_without_torch() -> None:
    few = "from benchmarks import tree, tree_calls\ntree_calls.PROMPTS = tree_calls.CONVERSATIONS = 4\n"
    few += "tree_calls.CONTINUATIONS = tree_calls.TURNS = 2\ntree_calls.EVICTED = 64\ntree_calls.MEMORY_NODES = 400\n"
    measured = loaded_by(few + "tree.main(['--shapes', '0', '--quiet'])")
    assert not measured & {"torch", "numpy", "rich"}


def test_a_cache_loads_torch_when_it_is_made_and_its_name_does_not() -> None:
    """Else the tests above could not fail."""
    assert "torch" not in loaded_by("import asynccache\nasynccache.AsyncCache")
    assert "torch" in loaded_by(f"import asynccache\nasynccache.AsyncCache({CONFIG})")


def test_every_public_name_is_there_and_known_to_type_checkers() -> None:
    for name in asynccache.__all__:
        assert getattr(asynccache, name) is not None
    assert set(dir(asynccache)) == set(asynccache.__all__)
    tree = ast.parse((ROOT / "asynccache" / "__init__.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported >= set(asynccache.__all__) - {"__version__"}
    with pytest.raises(AttributeError, match="has no attribute 'AsyncCach'"):
        asynccache.AsyncCach  # noqa: B018
