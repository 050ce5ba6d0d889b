"""The command line as a whole: help, versions, benchmarks that are imported only when asked for, and the size of tiers
that hold everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import asynccache
from asynccache import compiled
from asynccache.cli.main import main
from asynccache.cli.options import RunSettings
from asynccache.cli.run_cache import configure, tokens_needed
from asynccache.cli.traces import Trace, TraceRequest, survey
from asynccache.config import Full, Mamba, SlidingWindow
from benchmarks.tables import Chart, Row, bench


def ends_with(*arguments: str) -> int:
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with("--version") == 0
    assert capsys.readouterr().out == f"asynccache {asynccache.__version__}, {compiled.CORE} core\n"
    for arguments in ((), ("--help",), ("replay", "--help"), ("stress", "--help"), ("bench", "--help")):
        assert ends_with(*arguments) == 0
        assert "usage: asynccache" in capsys.readouterr().out


TABLE = "7 nodes\n       mean\nmatch  1.25\n\nthe CORE core ran\n"


def test_a_benchmark_prints_its_table_or_json_in_its_place_or_neither(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module: Any = ModuleType("benchmarks.nodes")
    module.add_arguments = lambda parser: None
    module.run = lambda args, tell: {"nodes": 7}
    rows = [Row("match", [1.25])]
    module.charts = lambda figures: [Chart(f"{figures['nodes']} nodes", ("mean",), rows)]
    assert bench(module, [], prog="nodes") == 0
    assert capsys.readouterr() == (TABLE.replace("CORE", compiled.CORE), "")
    assert bench(module, ["--json", "-"], prog="nodes") == 0
    said = capsys.readouterr()
    assert (json.loads(said.out)["nodes"], said.err) == (7, "")
    path = tmp_path / "figures.json"
    assert bench(module, ["--quiet", "--json", str(path)], prog="nodes") == 0
    assert capsys.readouterr() == ("", "")
    assert json.loads(path.read_text())["nodes"] == 7


def test_room_for_all_counts_every_page_once() -> None:
    trace = Trace([TraceRequest(0, 1024, 10, (1, 2)), TraceRequest(0, 1124, 10, (1, 2, 3)),
                   TraceRequest(0, 600, 10, (7, 8))])
    given = {"trace": "t", "concurrency": "1", "decode_tokens": "0", "page_size": "512",
             "insert_outputs": False}
    settings = RunSettings.read("replay", {**given, "device_tokens": "all", "host_tokens": "none"})
    needed = tokens_needed(settings, trace, survey(trace))
    assert needed % 512 == 0
    assert 4 * 512 <= needed <= 16 * 512
    (component,) = configure(settings, trace, survey(trace)).components
    assert isinstance(component, Full)
    assert (component.device_tokens, component.host_tokens) == (needed, 0)


def test_swa_and_mamba_get_their_part() -> None:
    settings = RunSettings.read("stress", {"components": "full,swa,mamba", "swa_ratio": "0.25",
                                           "device_tokens": "16384", "host_tokens": "32768"})
    _, swa, mamba = configure(settings).components
    assert isinstance(swa, SlidingWindow)
    assert (swa.device_tokens, swa.host_tokens) == (4096, 8192)
    assert isinstance(mamba, Mamba)
    assert mamba.device_states > settings.concurrency


@pytest.mark.parametrize(("line", "offered"), [
    ("asynccache st", {"stress", "store"}), ("asynccache stress --prefetch-p", {"--prefetch-policy"}),
    ("asynccache replay --rank-d", {"--rank-delay"}), ("asynccache store cl", {"clear"}),
    ("asynccache bench ", {"store"}),
])
def test_a_shell_completes_commands_and_their_options(line: str, offered: set[str], tmp_path: Path) -> None:
    environment = os.environ | {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
                                "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "offered")}
    done = subprocess.run([sys.executable, "-m", "asynccache"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = {word.strip() for word in (tmp_path / "offered").read_text().split("\n")}
    assert offered <= words
    assert all(word.startswith(line.rpartition(" ")[2]) for word in words)
