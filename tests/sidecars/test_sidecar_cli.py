"""``stress`` and ``replay`` with pools that hang on others: filled, moved and verified like all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main
from asynccache.cli.options import RunSettings
from asynccache.cli.run_cache import configure
from asynccache.config import CacheConfig
from asynccache.errors import ConfigError

pytestmark = pytest.mark.slow(0.6)

SMALL = ["--rate", "0", "--concurrency", "6", "--bytes-per-token", "64", "--window", "128", "--requests", "80",
         "--device-tokens", "12288", "--host-tokens", "24576", "--components", "full,swa", "--quiet"]


def config(**given: str) -> CacheConfig:
    return configure(RunSettings.read("stress", {"components": "full,swa", **given}))


def stress(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    out = tmp_path / "report.json"
    assert main(["stress", *SMALL, *arguments, "--json", str(out)]) == status
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_the_list_says_which_pool_hangs_on_which_and_how_large_it_is() -> None:
    specs = config(sidecars="idx:full:32, draft:idx:6,state:swa:1", page_size="16", layers="4").sidecars
    assert [(s.name, s.indices_from, s.bytes_per_page, s.layers) for s in specs] == [
        ("idx", "full", 512, 4), ("draft", "idx", 96, 4), ("state", "swa", 16, 4),
    ]  # fmt: skip
    odd = config(sidecars="idx:full:1", page_size="3", layers="4", device_tokens="3000", host_tokens="6000")
    assert odd.sidecars[0].layers == 1
    assert config().sidecars == config(sidecars="none").sidecars == ()
    assert config().components[0].bytes_per_token == 512  # type: ignore[union-attr]


@pytest.mark.parametrize(("page", "state"), [("16", True), ("128", False), ("256", False)])
def test_the_preset_has_the_layout_of_the_model(page: str, state: bool) -> None:
    specs = {s.name: s for s in config(sidecars="deepseek-v4,draft:full:8", page_size=page, device_tokens="1024",
                                       host_tokens="2048", swa_ratio="1").pools()}  # fmt: skip
    assert specs.pop("full").bytes_per_page == 0
    assert ("c128_state" in specs) == state
    sources = {name: spec.indices_from for name, spec in specs.items() if name != "c128_state"}
    assert sources == {"swa": None, "c4": "full", "c4_indexer": "full", "c128": "full", "c4_state": "swa",
                       "c4_indexer_state": "swa", "draft": "full"}  # fmt: skip
    assert specs["c4"].bytes_per_page * 4 == specs["swa"].bytes_per_page == int(page) * 512
    assert specs["c128"].bytes_per_page * 128 == specs["swa"].bytes_per_page
    assert config(sidecars="deepseek-v4").components[0].layers == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("idx:full", "--sidecars=idx:full: 'idx:full' must be NAME:FROM:BYTES_PER_TOKEN or deepseek-v4"),
        ("a:full:1,b", "'b' must be NAME:FROM:BYTES_PER_TOKEN"),
        ("a:full:many", "'a:full:many' must be"),
        ("a:full:0", "'a:full:0' must be NAME:FROM:BYTES_PER_TOKEN or deepseek-v4, of at least 1 byte per token"),
        ("a:b:4", "sidecar 'a': indices_from='b' is no pool"),
        ("a:mamba:4", "sidecar 'a': indices_from='mamba' is no pool"),
        ("a:b:4,b:a:4", "closes a cycle"),
        ("full:full:4", "names must be unique"),
        ("a b:full:4", "Expected `str` matching regex"),
    ],
)
def test_a_list_that_cannot_be_is_refused_before_anything_starts(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stress", *SMALL, "--sidecars", text]) == 2
    assert message in capsys.readouterr().err


def test_an_entry_without_its_source_names_the_option() -> None:
    with pytest.raises(ConfigError, match="--sidecars=x"):
        configure(RunSettings.read("replay", {"sidecars": "x"}))


@pytest.mark.parametrize("storage", ["memory:?capacity=64MiB", "file"])
def test_stress_is_clean_with_the_stack_of_deepseek_v4(storage: str, tmp_path: Path) -> None:
    url = storage if storage != "file" else f"file:{tmp_path}/kv?capacity=256MiB"
    plain = stress(tmp_path, "--storage", url.replace("kv?", "plain?"))
    report = stress(tmp_path, "--storage", url, "--sidecars", "deepseek-v4,draft:full:8")
    assert report["served"] == 80
    assert report["verify"]["mismatches"] == 0
    assert report["verify"]["pages"] > 1.5 * plain["verify"]["pages"], "each pool's pages are verified"
    assert set(report["leaks"].values()) == {0}
    assert report["tokens"]["hit"]["host"] > 0


def test_a_trace_is_replayed_with_the_stack_of_deepseek_v4(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 512 * turn + 7, "output_length": 3, "hash_ids": [*range(turn), 100 + turn]}
        for turn in (2, 4, 6, 3, 6, 2)
    ]
    trace, out = tmp_path / "trace.jsonl", tmp_path / "report.json"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--components", "full,swa", "--sidecars", "deepseek-v4", "--page-size", "256",
                 "--device-tokens", "8192", "--host-tokens", "16384", "--concurrency", "1", "--bytes-per-token", "64",
                 "--quiet"]  # fmt: skip
    assert main(["replay", str(trace), *arguments, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["verify"]["mismatches"] == 0
    hit = sum(report["tokens"]["hit"].values())
    assert hit == 512 * (2 + 4 + 3 + 6 + 2)


def test_stress_is_clean_with_faults_and_cancellations(tmp_path: Path) -> None:
    report = stress(tmp_path, "--components", "full,swa,mamba", "--mamba-bytes", "1024", "--faults", "0.2",
                    "--cancel-rate", "0.3", "--sidecars", "idx:full:8,tail:idx:3,state:swa:4,conv:mamba:2")  # fmt: skip
    assert report["cancelled"] > 5
    assert report["failed"] == report["verify"]["mismatches"] == 0
    assert set(report["leaks"].values()) == {0}
