"""Runs on a store whose process was killed, whose bits were flipped or whose disk was full. Everything served
afterwards is right, and pages from before the accident are used."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli.main import main
from asynccache.cli.traces import BLOCK_TOKENS
from tests import warm
from tests.cli.trace_kit import ALL, BY_BLOCK, made_trace

pytestmark = pytest.mark.slow(5)

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("ASYNCCACHE_TRACE", "")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
MIB = 1 << 20


def run(*arguments: str, report: Path) -> dict[str, Any]:
    """A run in this process that must be green; its report."""
    assert main([*arguments, "--quiet", "--json", str(report)]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["ok"]
    assert found["verify"]["mismatches"] == found["failed"] == 0
    assert set(found["leaks"].values()) == {0}
    return found


def killed(arguments: Sequence[str], written: int) -> None:
    """Start a process of its own and kill it once it has written so many bytes."""
    command = [sys.executable, "-m", "asynccache", *arguments, "--quiet"]
    process = warm.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while _written(process.pid) < written:
        assert process.poll() is None, f"it ended before it was killed: {process.communicate()[1]}"
        assert time.monotonic() < deadline, "it wrote too little"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def _written(pid: int) -> int:
    """Bytes that a process has handed to the kernel; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


@pytest.mark.slow(10)
@pytest.mark.parametrize("components", ["full", "full,swa,mamba"])
def test_a_replay_that_was_killed_is_replayed_from_what_it_had_stored(components: str, tmp_path: Path) -> None:
    """There is room for everything in L1 and L2, so what comes from storage was stored by a process that was killed."""
    made = made_trace(tmp_path / "trace.jsonl", 40, requests=240, growth=(2, 12), seed=11)
    trace = REAL if Path(REAL).is_file() else str(made)
    arguments = ["replay", trace, "--limit", "240", "--components", components, "--device-tokens", "all",
                 "--host-tokens", "all", "--bytes-per-token", "64", "--mamba-bytes", "4096", "--concurrency", "8",
                 "--storage", f"file:{tmp_path}/kv?capacity=1GiB&segment=16MiB"]  # fmt: skip
    for written in (9 * MIB, 4 * MIB, 23 * MIB):
        killed(arguments, written)
    again = run(*arguments, report=tmp_path / "again.json")
    assert again["storage"]["scanned_groups"] > 0, "no footer can name what was written right before the kill"
    assert again["storage"]["corrupt_pages"] == 0
    assert again["tokens"]["hit"]["storage"] > 64 * BLOCK_TOKENS
    last = run(*arguments, report=tmp_path / "last.json")
    assert last["tokens"]["hit"]["storage"] > again["tokens"]["hit"]["storage"]
    if components == "full":
        assert again["blocks"]["hit"] > again["blocks"]["shared"]
        assert last["blocks"]["hit"] == last["blocks"]["total"]


@pytest.mark.slow
def test_a_stress_run_that_was_killed_is_no_harm_to_the_next(tmp_path: Path) -> None:
    arguments = ["stress", *ALL, "--rate", "0", "--seed", "3", "--device-tokens", str(1 << 19), "--host-tokens",
                 str(1 << 19), "--bytes-per-token", "64", "--mamba-bytes", "1024", "--end-hints", "0",
                 "--storage", f"file:{tmp_path}/kv?capacity=512MiB&segment=8MiB"]  # fmt: skip
    for written in (3 * MIB, 12 * MIB):
        killed([*arguments, "--duration", "100", "--faults", "0.1", "--cancel-rate", "0.2"], written)
    found = run(*arguments, "--requests", "150", report=tmp_path / "report.json")
    assert found["evicted"] == {"device": 0, "host": 0}
    assert found["tokens"]["hit"]["storage"] > 0


def small_replay(tmp_path: Path) -> list[str]:
    trace = made_trace(tmp_path / "trace.jsonl", 10, requests=60, growth=(2, 12), seed=11)
    return ["replay", str(trace), *BY_BLOCK, "--device-tokens", "all", "--host-tokens", "all", "--storage",
            f"file:{tmp_path}/kv?capacity=64MiB&segment=4MiB"]  # fmt: skip


def test_flipped_bits_in_a_store_are_misses_once_and_never_wrong_pages(tmp_path: Path) -> None:
    """A fetch ends before the first page that does not verify, so a path with several takes as many runs."""
    arguments = small_replay(tmp_path)
    first = run(*arguments, report=tmp_path / "first.json")
    segments = [path for path in (tmp_path / "kv").iterdir() if path.stat().st_size >= MIB]
    rng = random.Random(4)
    for segment in segments:
        flip(segment, rng, first["stages"]["backup_storage"]["bytes"])
    found = [run(*arguments, report=tmp_path / f"{i}.json") for i in range(8)]
    corrupt = [report["storage"]["corrupt_pages"] for report in found]
    assert corrupt[0] > 5
    assert found[0]["tokens"]["hit"]["storage"] > 0
    assert found[0]["blocks"]["hit"] < found[0]["blocks"]["total"]
    assert sorted(corrupt, reverse=True) == corrupt, "what did not verify is deleted and stored anew"
    assert corrupt[-1] == 0
    assert found[-1]["blocks"]["hit"] == found[-1]["blocks"]["total"]


def flip(path: Path, rng: random.Random, size: int) -> None:
    """One bit in every 100 KB or so of what is there."""
    raw = bytearray(path.read_bytes())
    for at in range(0, min(size, len(raw)), 100_000):
        where = at + rng.randrange(min(100_000, len(raw) - at))
        raw[where] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def test_on_a_full_disk_the_cache_works_without_storing_and_counts_it(tmp_path: Path) -> None:
    """No file of this process may grow beyond 1 MiB, which is less than a segment."""
    limited = ("import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
               "from asynccache.cli.main import main; sys.exit(main(sys.argv[1:]))")  # fmt: skip
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", limited, "stress", *ALL, "--rate", "0", "--requests", "60",
               "--device-tokens", "12288",
               "--host-tokens", "24576", "--bytes-per-token", "64", "--mamba-bytes", "1024", "--quiet", "--json",
               str(report), "--storage", f"file:{tmp_path}/kv?capacity=64MiB&segment=2MiB"]  # fmt: skip
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["ok"]
    assert found["served"] == 60
    assert found["verify"]["mismatches"] == 0
    assert found["tokens"]["hit"]["host"] > 0
    assert found["storage"]["errors"] >= 1
    assert found["storage"]["refused_writes"] > found["storage"]["errors"], "writes are given up for a while"
    assert found["stages"]["backup_storage"]["errors"] > 0


def test_a_folder_that_another_process_uses_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path}/kv?capacity=64MiB"
    hold = ("import asyncio, sys\nfrom asynccache.storage import backend_class, parse_url\n"
            "from asynccache.testing.backend_suite import LAYOUT\n"
            "async def main():\n"
            "    url = parse_url(sys.argv[1])\n"
            "    store = await backend_class(url.scheme).open(url, LAYOUT)\n"
            "    print('open', flush=True); sys.stdin.read(); await store.aclose()\n"
            "asyncio.run(main())")  # fmt: skip
    with subprocess.Popen([sys.executable, "-c", hold, url], env=ENVIRONMENT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert main(["stress", "--quiet", "--requests", "1", "--storage", url]) == 2
        process.communicate("")
    error = capsys.readouterr().err
    assert f"{tmp_path}/kv' is in use by process {process.pid}" in error
    assert error.count("\n") == 1
    assert main(["stress", "--quiet", "--requests", "3", "--storage", url]) == 0
