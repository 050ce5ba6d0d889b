"""Which core runs is told by the metrics and by ``asynccache doctor``; ``benchmarks/tree.py`` measures both cores where
there are both.

``asynccache --version`` and the other commands: ``tests/cli/test_cli_main.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache import AsyncCache, __version__, compiled
from asynccache.cli.main import main
from tests.runtime.runtime_kit import settings

ROOT = Path(__file__).parents[2]
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


def test_doctor_says_which_core_runs_and_why(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["core"] == request.config.getoption("--core") == compiled.CORE
    assert report["core_why"] == ("ASYNCCACHE_PURE is set" if compiled.CORE == "pure" else None)
    assert main(["doctor"]) == 0
    assert compiled.CORE in capsys.readouterr().out


@pytest.mark.slow(5)
def test_the_tree_is_measured_with_both_cores_side_by_side(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ASYNCCACHE_PURE"}
    says = "from asynccache import compiled; print(compiled.CORE, compiled.WHY, sep=': ')"
    told = subprocess.run([sys.executable, "-c", says], cwd=ROOT, env=environment, capture_output=True, text=True,
                          check=True).stdout.strip()  # fmt: skip
    if not told.startswith("compiled"):
        pytest.skip(f"there is no compiled core to measure: {told}")
    other = tmp_path / "python"
    started = "assert sys.argv[1:3] == ['-m', 'benchmarks.tree']\nsys.exit(tree.main(sys.argv[3:]))\n"
    other.write_text(f"#!{sys.executable}\n{FEW}{started}")
    other.chmod(0o755)
    measure = f"sys.executable = {str(other)!r}\nsys.exit(tree.main(sys.argv[1:]))"
    command = [sys.executable, "-c", FEW + measure, "cores", "--shapes", "0", "--json", str(tmp_path / "tree.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cores = json.loads((tmp_path / "tree.json").read_text())["cores"]
    ((shape, operations),) = cores["compiled"].items()
    lines = done.stdout.splitlines()
    (at,) = [number for number, line in enumerate(lines) if line.split() == ["compiled", "pure"]]
    for row, (operation, found) in zip(lines[at + 1 :], operations.items(), strict=False):
        pure = cores["pure"][shape][operation]["cpu"]["p50"]
        assert [float(one) for one in row.split(found["what"][:30])[1].split()[-2:]] == [
            pytest.approx(p50, rel=0.02, abs=0.06) for p50 in (found["cpu"]["p50"], pure)]
