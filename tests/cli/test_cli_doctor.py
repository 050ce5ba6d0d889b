"""``asynccache doctor`` and ``config vllm|sglang``."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from asynccache_sglang.options import resolve
from asynccache_vllm.options import TierOptions

from asynccache.cli import doctor
from asynccache.extras import BRINGS, installed
from tests.processes import Command, program, run

# ``asynccache doctor``: what it says of a machine, in 80 columns, whatever is missing.


def test_doctor_speaks_of_all_that_a_cache_has_to_do_with(tmp_path: Path, command: Command) -> None:
    report = json.loads(command("doctor", "--folder", str(tmp_path), "--json").stdout)
    assert report["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report["torch"] == version("torch")
    assert report["core"] in ("pure", "compiled")
    assert report["extras"].keys() == BRINGS.keys()
    assert 0 < report["limits"]["available_bytes"] <= report["memory"]["bytes"]
    assert report["disk"]["folder"] == str(tmp_path)
    assert 0 < report["disk"]["free_bytes"] < report["disk"]["bytes"]
    said = command("doctor", "--folder", str(tmp_path)).stdout
    named = [line.split()[0] for line in said.splitlines() if line[:1].strip()]
    assert named[:6] == ["python", "core", "memory", "disk", "extras", "torch"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/no/such/folder", "\0", "/proc"])
def test_a_folder_that_cannot_hold_a_store_is_told_and_is_no_error(folder: str, command: Command) -> None:
    assert "cannot hold a store: " in command("doctor", "--folder", folder).stdout


def test_no_line_is_longer_than_80_columns(tmp_path: Path) -> None:
    deep = tmp_path / ("folder " * 8) / ("another " * 8)
    deep.mkdir(parents=True)
    report = doctor.examine("cuda:0", str(deep))
    for changed in (report, report | {"extras": dict.fromkeys(BRINGS, False)}, report | {"core_why": "because " * 30}):
        lines = list(doctor.told(changed))
        assert [line for line in lines if len(line) > 80 and not line.strip().startswith(str(tmp_path))] == []


def test_what_an_extra_needs_is_told_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = installed
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "pyzmq" else there(package))
    report = doctor.examine("cuda:0")
    assert not report["extras"]["events"]
    assert any(line.strip() == "events: pip install 'pyzmq>=26'" for line in doctor.told(report))


def test_huge_pages_are_told_where_there_are_any(tmp_path: Path) -> None:
    report = doctor.examine("cuda:0", str(tmp_path))
    assert report["memory"]["huge_bytes"] % (2 << 20) == 0
    report["memory"]["huge_bytes"] = 6 << 30
    assert "6.0 GiB of free huge pages, for asynccache serve" in " ".join(" ".join(doctor.told(report)).split())


# ``asynccache config vllm|sglang``: what it prints is what our plug-ins take, and it reaches them through a shell.


FILE = "file:/var/kv?capacity=500GiB"
PER_RANK = "file:/var/kv/{tp_rank}?capacity=500GiB"


def printed(command: Command, *arguments: str) -> tuple[str, str]:
    said = command("config", *arguments)
    assert said.stdout.count("\n") == 1
    assert all(line.startswith("asynccache: assumed: ") for line in said.stderr.splitlines())
    return said.stdout.strip(), said.stderr


def tier(line: str) -> tuple[dict[str, Any], TierOptions]:
    """vLLM's part of the line, and what our tier makes of its entry."""
    extra = json.loads(line)["kv_connector_extra_config"]
    (entry,) = extra["secondary_tiers"]
    assert entry.pop("type") == "asynccache"
    return extra, TierOptions.parse(entry)


def flags(words: list[str]) -> tuple[argparse.Namespace, Any]:
    """SGLang's flags as its server would read them, and what our backend makes of the extra config."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name, kind in (("page-size", int), ("hicache-size", int), ("hicache-mem-layout", str),
                       ("hicache-write-policy", str), ("hicache-storage-backend", str),
                       ("hicache-storage-backend-extra-config", json.loads)):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--enable-hierarchical-cache", action="store_true")
    found = parser.parse_args(words)
    return found, resolve(found.hicache_storage_backend_extra_config)


def test_vllms_json_is_what_the_tier_takes(command: Command) -> None:
    line, said = printed(command, "vllm", "--storage", FILE, "--host", "32GiB")
    extra, options = tier(line)
    assert json.loads(line)["kv_connector"] == "OffloadingConnector"
    assert extra["cpu_bytes_to_use"] == 32 << 30
    assert "block_size" not in extra
    assert options == TierOptions(storage=(FILE,))
    assert "{dp_rank}" in said
    assert "digest is the namespace" in said


def test_several_stores_a_namespace_and_a_block(command: Command) -> None:
    stores = ("--storage", "memory:", "--storage", "file:/kv/{dp_rank}")
    line, said = printed(command, "vllm", *stores, "--namespace", "llama 3, of May", "--block-size", "64")
    extra, options = tier(line)
    assert extra["block_size"] == 64
    assert options == TierOptions(storage=("memory:", "file:/kv/{dp_rank}"), namespace="llama 3, of May")
    for word in ("16GiB of host memory", "memory: may end", "10GiB; ?capacity", "--block-size divides 64", "'llama 3"):
        assert word in said


def test_a_version_whose_pages_are_the_same(command: Command) -> None:
    line, said = printed(command, "vllm", "--storage", FILE, "--compatible-with", "0.32.0")
    assert tier(line)[1] == TierOptions(storage=(FILE,), compatible_with="0.32.0")
    assert "this vllm stores the same bytes as vllm 0.32.0" in said
    assert "begins with an empty store" not in said
    line, said = printed(command, "sglang", "--storage", FILE, "--compatible-with", "0.5.23.post1")
    assert flags(line.split())[1].compatible_with == "0.5.23.post1"
    assert "--compatible-with" in printed(command, "vllm", "--storage", FILE)[1]


def test_sglangs_flags_are_what_the_backend_takes(command: Command) -> None:
    line, said = printed(command, "sglang", "--storage", PER_RANK, "--host", "32GiB", "--block-size", "128")
    found, options = flags(line.split())
    assert (found.page_size, found.hicache_size, found.hicache_mem_layout) == (128, 34, "page_first")
    assert found.enable_hierarchical_cache
    assert options.storage == (PER_RANK,)
    assert "K and V" in said
    line, said = printed(command, "sglang", "--storage", "memory:")
    found, _ = flags(line.split())
    assert (found.page_size, found.hicache_size) == (64, None)
    assert "twice the device's" in said


@pytest.mark.slow
def test_the_flags_come_through_a_shell_whole() -> None:
    """As they stand in a command line, without quotes: with blanks, patterns and several stores."""
    storage = ("--storage", PER_RANK, "--storage", "file:/b[0-9]*?name=far")
    name = "a b * ? é \" '$HOME`"
    asked = (sys.executable, "-m", "asynccache", "config", "sglang", *storage, "--namespace", name)
    done = program("bash", "-c", 'printf "%s\\n" $("$@" 2> /dev/null)', "bash", *asked)
    _, options = flags(done.stdout.splitlines())
    assert options.storage == (PER_RANK, "file:/b[0-9]*?name=far")
    assert options.namespace == name


def test_secrets_are_in_the_line_and_nowhere_else(command: Command) -> None:
    line, said = printed(command, "vllm", "--storage", "redis://:hunter2@kv")
    assert tier(line)[1].storage == ("redis://:hunter2@kv",)
    assert "may see the secret in redis://***@kv" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("words", [["config", "vllm", "--storage", "memory:"], ["verify-engine", "127.0.0.1:1"]])
def test_no_torch_is_imported(words: list[str]) -> None:
    script = f"import sys; from asynccache.cli.main import main; main({words}); sys.exit('torch' in sys.modules)"
    assert run("-c", script).returncode == 0
