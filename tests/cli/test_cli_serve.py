"""``asynccache serve``: its options and its file, its lines, its metrics, its end."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import serve
from asynccache.cli.serve import Options, rows
from tests.host.host_kit import socket_path
from tests.processes import Command, Running
from tests.stores.server import free_port
from tests.waiting import wait_until

GIB = 1 << 30


def options(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    Options.add_arguments(parser, "serve")
    return Options.read("serve", vars(parser.parse_args(words)))


def test_options_and_a_file_say_the_same(tmp_path: Path) -> None:
    given = options(
        "--listen", "unix:/run/kv.sock", "--memory", "64GiB", "--storage", "file:/var/kv", "--storage", "redis://h",
        "--limit", "llama=16GiB", "--limit", "qwen/3=1GiB", "--huge", "--metrics", "0.0.0.0:9100",
    )  # fmt: skip
    file = tmp_path / "serve.toml"
    file.write_text(
        'listen = "unix:/run/kv.sock"\nmemory = "64GiB"\nstorage = ["file:/var/kv", "redis://h"]\nhuge = true\n'
        'metrics = "0.0.0.0:9100"\n[limit]\nllama = "16GiB"\n"qwen/3" = "1GiB"\n'
    )
    read = options("--config", str(file))
    for one in (given, read):
        assert (one.path, one.memory, one.huge) == ("/run/kv.sock", 64 * GIB, True)
        assert one.storage == ("file:/var/kv", "redis://h")
        assert one.limits == {"llama": 16 * GIB, "qwen/3": GIB}
    assert options("--config", str(file), "--memory", "1GiB").memory == GIB, "what is given here wins"


def test_an_empty_text_names_no_store_and_no_limit() -> None:
    """As a unit or a container gives it whose variable is not set."""
    read = options("--listen", "unix:/run/x.sock", "--memory", "1GiB", "--storage", "", "--limit", "")
    assert (read.storage, read.limits) == ((), {})


def test_the_rows_say_what_is_wrong() -> None:
    now: dict[str, float] = {
        "capacity_bytes": GIB, "free_bytes": GIB // 4, "pages": 1234, "clients": 3, "processes": 2, "hits": 90,
        "misses": 10, "stored": 100, "evicted": 7, "reserved_bytes": 1 << 20, "oldest_reservation": 31.5, "no_room": 2,
        "damaged": 0, "malformed": 1, "died": 0, "file.waiting": 5, "file.written": 10, "file.breaker": 1,
    }  # fmt: skip
    assert dict(rows(now, {"hits": 30, "stored": 100}, 60.0)) == {
        "memory": "75.0 % of 1.0 GiB, 1,234 pages", "clients": "3 of 2 processes", "hits": "90.0 % of 100 pages, 1/s",
        "stored": "100 pages, 0/s; 7 evicted", "writing": "1.0 MiB, the oldest for 31.5 s",
        "also": "2 found no room, 1 malformed requests",
        "file": "10 pages written, 0 read, 5 waiting; left alone, it does not answer",
    }  # fmt: skip


def page(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_serves_tells_and_ends(number: int, tmp_path: Path, command: Command) -> None:
    path, port = socket_path(), free_port()
    words = ["serve", "--listen", f"unix:{path}", "--memory", "32MiB", "--metrics", f"127.0.0.1:{port}",
             "--storage", f"file:{tmp_path}/kv?capacity=64MiB", "--limit", "a=1MiB"]  # fmt: skip
    with Running("-m", "asynccache", *words, popen=subprocess.Popen) as process:
        wait_until(lambda: os.path.exists(path))
        url = f"host:{path}?label=a"
        command("bench", "store", url, "--page-sizes", "64KiB", "--bytes", "512KiB", "--repeat", "1", "--quiet",
                "--batch", "4", "--concurrency", "1")  # fmt: skip
        told = json.loads(command("store", "stat", url, "--json", "-").stdout)
        assert told["ok"]
        status, text = page(port, "/metrics")
        assert status == 200
        figures: dict[str, Any] = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(figures["asynccache_host_stored_total"]) > 0
        assert float(figures['asynccache_host_label_stored_total{label="a"}']) > 0
        assert 'asynccache_host_store_written_total{store="file"}' in figures
        prometheus = pytest.importorskip("prometheus_client.parser")
        assert len(list(prometheus.text_string_to_metric_families(text))) > 20
        assert page(port, "/healthz") == (200, "ok\n")
        assert page(port, "/else")[0] == 404
        said = f"listen=unix:{path}: a host process listens there; --replace takes over"
        assert said in command(*words, status=2).stderr, "to a second one on the same socket and folder"
        command("store", "verify", url, "--json", "-")
        command("store", "clear", url, "--yes")
        done = process.ended(number)
    assert done.returncode == 0
    assert done.stderr.startswith(f"asynccache serves unix:{path} with 31.3 MiB for pages\n")
    assert "Traceback" not in done.stderr
    assert not os.path.exists(path)


def test_a_line_of_json_and_a_line_of_text(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    monkeypatch.setattr(serve, "LINE_EVERY", 0.05)
    file = tmp_path / "counts"
    for words, on in ((["--json"], "stdout"), (["--json", str(file)], "stderr")):
        path = socket_path()
        signaller = threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGTERM))
        signaller.start()
        told = command("serve", "--listen", f"unix:{path}", "--memory", "2MiB", *words)
        signaller.join()
        lines = getattr(told, on).splitlines()
        assert len(lines) > 2
        if on == "stdout":
            assert json.loads(lines[-1])["pages"] == 0
        else:
            assert json.loads(file.read_text().splitlines()[-1])["pages"] == 0
            assert "memory 0.0 % of 1.9 MiB, 0 pages · clients 0 of 0 processes" in lines[-1]
