"""``asynccache config vllm|sglang``: what it prints is what our plug-ins take, and it reaches them through a shell."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import pytest
from asynccache_sglang.options import resolve
from asynccache_vllm.options import TierOptions

from asynccache.cli.main import main

FILE = "file:/var/kv?capacity=500GiB"
PER_RANK = "file:/var/kv/{tp_rank}?capacity=500GiB"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(["config", *arguments]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert all(line.startswith("asynccache: assumed: ") for line in said.err.splitlines())
    return said.out.strip(), said.err


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


def test_vllms_json_is_what_the_tier_takes(capsys: pytest.CaptureFixture[str]) -> None:
    line, said = printed(capsys, "vllm", "--storage", FILE, "--host", "32GiB")
    extra, options = tier(line)
    assert json.loads(line)["kv_connector"] == "OffloadingConnector"
    assert extra["cpu_bytes_to_use"] == 32 << 30
    assert "block_size" not in extra
    assert options == TierOptions(storage=(FILE,))
    assert "{dp_rank}" in said
    assert "digest is the namespace" in said


def test_several_stores_a_namespace_and_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    stores = ("--storage", "memory:", "--storage", "file:/kv/{dp_rank}")
    line, said = printed(capsys, "vllm", *stores, "--namespace", "llama 3, of May", "--block-size", "64")
    extra, options = tier(line)
    assert extra["block_size"] == 64
    assert options == TierOptions(storage=("memory:", "file:/kv/{dp_rank}"), namespace="llama 3, of May")
    for word in ("16GiB of host memory", "memory: may end", "10GiB; ?capacity", "--block-size divides 64", "'llama 3"):
        assert word in said


def test_a_version_whose_pages_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    line, said = printed(capsys, "vllm", "--storage", FILE, "--compatible-with", "0.32.0")
    assert tier(line)[1] == TierOptions(storage=(FILE,), compatible_with="0.32.0")
    assert "this vllm stores the same bytes as vllm 0.32.0" in said
    assert "begins with an empty store" not in said
    line, said = printed(capsys, "sglang", "--storage", FILE, "--compatible-with", "0.5.23.post1")
    assert flags(line.split())[1].compatible_with == "0.5.23.post1"
    assert "--compatible-with" in printed(capsys, "vllm", "--storage", FILE)[1]


def test_sglangs_flags_are_what_the_backend_takes(capsys: pytest.CaptureFixture[str]) -> None:
    line, said = printed(capsys, "sglang", "--storage", PER_RANK, "--host", "32GiB", "--block-size", "128")
    found, options = flags(line.split())
    assert (found.page_size, found.hicache_size, found.hicache_mem_layout) == (128, 34, "page_first")
    assert found.enable_hierarchical_cache
    assert options.storage == (PER_RANK,)
    assert "K and V" in said
    line, said = printed(capsys, "sglang", "--storage", "memory:")
    found, _ = flags(line.split())
    assert (found.page_size, found.hicache_size) == (64, None)
    assert "twice the device's" in said


@pytest.mark.slow
def test_the_flags_come_through_a_shell_whole() -> None:
    """As they stand in a command line, without quotes: with blanks, patterns and several stores."""
    storage = ("--storage", PER_RANK, "--storage", "file:/b[0-9]*?name=far")
    name = "a b * ? é \" '$HOME`"
    asked = [sys.executable, "-m", "asynccache", "config", "sglang", *storage, "--namespace", name]
    script = 'printf "%s\\n" $("$@" 2> /dev/null)'
    done = subprocess.run(["bash", "-c", script, "bash", *asked], capture_output=True, text=True, check=True)
    _, options = flags(done.stdout.splitlines())
    assert options.storage == (PER_RANK, "file:/b[0-9]*?name=far")
    assert options.namespace == name


def test_secrets_are_in_the_line_and_nowhere_else(capsys: pytest.CaptureFixture[str]) -> None:
    line, said = printed(capsys, "vllm", "--storage", "redis://:hunter2@kv")
    assert tier(line)[1].storage == ("redis://:hunter2@kv",)
    assert "may see the secret in redis://***@kv" in said
    assert "hunter2" not in said


@pytest.mark.parametrize("command", [["config", "vllm", "--storage", "memory:"], ["verify-engine", "127.0.0.1:1"]])
def test_no_torch_is_imported(command: list[str]) -> None:
    script = f"import sys; from asynccache.cli.main import main; main({command}); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
