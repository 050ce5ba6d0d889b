"""The store benchmark measures what it says, on any backend, without torch."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynccache.cli import bench_store
from asynccache.errors import ConfigError

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("plug_ins")


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_store.add_arguments(parser)
    return parser.parse_args(words)


SMALL = ("--page-sizes", "16KiB,64KiB", "--bytes", "1MiB", "--repeat", "1")


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_file_store_is_measured_buffered_and_direct(tmp_path: Path, loop: str) -> None:
    told: list[str] = []
    report = bench_store.run(options(f"file:{tmp_path}/s?capacity=64MiB", *SMALL, "--loop", loop), told.append)
    assert [size["page_bytes"] for size in report["sizes"]] == [16384, 65536]
    for size in report["sizes"]:
        assert size["raw"].keys() == {"memcpy", "pwritev", "pwritev_again", "preadv"}
        for mode in ("buffered", "direct"):
            assert size[mode]["mismatches"] == 0
            for name in ("put", "get", "get_shuffled"):
                assert size[mode][name]["gb_per_s"] > 0
                assert size[mode][name]["p99_ms"] >= size[mode][name]["p50_ms"] > 0
        assert size["buffered"]["stats"]["direct"] == 0
    assert len(told) == 6
    json.dumps(report)


def test_another_store_is_measured_as_it_is() -> None:
    report = bench_store.run(options("memory:", *SMALL))
    assert all(size["store"]["mismatches"] == 0 and "pwritev" not in size["raw"] for size in report["sizes"])


def test_without_a_url_it_uses_a_folder_of_its_own_and_removes_it() -> None:
    report = bench_store.run(options(*SMALL))
    assert not Path(report["settings"]["url"].removeprefix("file:").split("?")[0]).parent.exists()


@pytest.mark.parametrize(
    "words",
    [("none",), ("--bytes", "1KiB"), ("--page-sizes", "big"), ("--concurrency", "0"), ("--repeat", "0"), ("tea:pot",)],
)
def test_unusable_options_are_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        bench_store.run(options(*SMALL, *words))


def test_it_imports_no_torch() -> None:
    code = "import sys, asynccache.cli.bench_store, asynccache_backends.file; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
