"""``asynccache doctor --engine``: what is right is called right, and what is wrong is said, before a server starts."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from asynccache.cli import engine_doctor
from asynccache.cli.engine_doctor import PLUGINS, Plugin, examine_engine, told
from asynccache.extras import installed
from tests.processes import Command
from tests.stores.redis_server import RedisServer

ENGINES = ("vllm", "sglang", "transformers")


def found(report: dict[str, Any], about: str, state: str) -> list[str]:
    return [one["seen"] for one in report["findings"] if (one["about"], one["state"]) == (about, state)]


def examined(engine: Any = "transformers", *storage: str, host: int | None = None) -> dict[str, Any]:
    report = examine_engine(engine, storage, host, lambda line: None)
    assert all(len(line) <= 80 for line in told(report))
    return report


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines whose import takes no time, so that the rest is looked at."""
    monkeypatch.setattr(engine_doctor, "PLUGINS", {name: Plugin(("torch",), "pass") for name in ENGINES})


@pytest.mark.slow(7)
def test_transformers_here_is_right(command: Command, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = command("doctor", "--engine", "transformers", "--storage", f"file:{tmp_path}/kv?capacity=64MiB").stdout
    assert printed.startswith("well  version  transformers ")
    assert "it fits the interface of this transformers" in printed
    assert printed.endswith("nothing is wrong\n")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_here_is_said(engine: str, command: Command) -> None:
    if any(installed(name) for name in PLUGINS[engine].packages):  # type: ignore[index]
        pytest.skip(f"{engine} is here")
    report = json.loads(command("doctor", "--engine", engine, "--host", "1GiB", "--json", status=1).stdout)
    (said,) = found(report, "version", "wrong")
    assert said == report["error"]
    assert sys.executable in said


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ImportError('asynccache_vllm does not work with vLLM 9: its TransferJob has no keys')",
         "asynccache_vllm does not work with vLLM 9: its TransferJob has no keys"),
        ("import os; os.abort()", "the import ended with status -6"),
        ("import time; time.sleep(60)", "could not be imported within 0.3 s"),
    ],
)  # fmt: skip
def test_a_plug_in_that_does_not_fit_is_said(program: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_doctor, "PLUGINS", {"vllm": Plugin(("torch",), program)})
    monkeypatch.setattr(engine_doctor, "PATIENCE", 0.3 if "sleep" in program else 60.0)
    assert any(said in one for one in found(examined("vllm", host=1), "plug-in", "wrong"))


@pytest.mark.usefixtures("quick")
def test_a_variable_that_keeps_vllm_from_loading_us_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert not found(examined("vllm", host=1), "plug-in", "wrong")
    monkeypatch.setenv("VLLM_PLUGINS", "lora,asynccache")
    assert not found(examined("vllm", host=1), "plug-in", "wrong")
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    assert found(examined("vllm", host=1), "plug-in", "wrong") == [
        "VLLM_PLUGINS=lora keeps vLLM from loading asynccache: add it"]


@pytest.mark.usefixtures("quick")
def test_memory_that_is_not_there_is_said() -> None:
    report = examined("vllm", host=1 << 50)
    assert found(report, "memory", "wrong")
    assert "docker run --shm-size" in found(report, "shared", "wrong")[0]
    assert not found(examined("sglang", host=1 << 50), "shared", "wrong")  # its host tier is not there
    assert examined("vllm", host=1)["error"] is None


@pytest.mark.usefixtures("quick")
def test_limits_of_the_shell_are_told() -> None:
    limits = {resource.RLIMIT_MEMLOCK: 64 << 10, resource.RLIMIT_NOFILE: 512}
    before = {which: resource.getrlimit(which) for which in limits}
    try:
        for which, most in limits.items():
            resource.setrlimit(which, (most, before[which][1]))
        lines = list(told(examined("vllm", host=1 << 30)))
    finally:
        for which, both in before.items():
            resource.setrlimit(which, both)
    assert any(line.startswith("note  memlock  ulimit -l: 64.0 KiB, less than the host tier") for line in lines)
    assert any(line.startswith("note  files    ulimit -n: 512") for line in lines)


@pytest.mark.usefixtures("quick")
def test_each_store_is_asked(tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "kv"
    command("stress", "--quiet", "--requests", "4", "--storage", f"file:{folder}?capacity=64MiB")
    before = sorted(path.name for path in folder.iterdir())
    report = examined("vllm", f"file:{folder}?capacity=64MiB", "memory:", f"file:{tmp_path}/{{dp_rank}}", host=1)
    answers = found(report, "store", "well")
    assert [" answers in " in one for one in answers] == [True, True, False]
    assert "does not exist yet and can be made" in answers[2]
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:hunter2@127.0.0.1:1", "redis://***@127.0.0.1:1: "), ("kv", "expected scheme:path"),
        ("none", "is no store"),
        ("file:/x?capcity=1", "capcity"), ("file:/dev/null/kv", "/dev/null is no folder"),
        ("file:/tmp/no/where?capacity=8000TiB", "and its disk has"),
        ("file:/x/{tp_rank}", "{tp_rank} means nothing under vllm"),
    ],
)  # fmt: skip
def test_a_store_that_cannot_be_used_is_said(url: str, said: str) -> None:
    (one,) = found(examined("vllm", url, host=1), "store", "wrong")
    assert said in one
    assert "hunter2" not in one


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_rights_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "may write to" in found(examined("vllm", f"file:{tmp_path}/kv", host=1), "store", "wrong")[0]


@pytest.mark.usefixtures("quick")
def test_a_redis_that_answers_and_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_doctor, "ANSWER", 1.0)
    RedisServer.installed()
    with RedisServer() as server:
        (said,) = found(examined("vllm", server.url, host=1), "store", "well")
        assert " answers in " in said
        assert "may be written to" in said
        assert server.say("DBSIZE") == ":0\r\n", "the page is gone"
        server.hang()
        try:
            assert found(examined("vllm", server.url, host=1), "store", "wrong")
        finally:
            server.resume()


@pytest.mark.usefixtures("quick")
def test_a_redis_that_this_user_may_not_use_is_said() -> None:
    RedisServer.installed()
    with RedisServer(password="hunter2") as server:
        (said,) = found(examined("vllm", server.url, host=1), "store", "wrong")
        assert "auth" in said.lower()
        assert found(examined("vllm", server.url.replace("//", "//:hunter2@"), host=1), "store", "well")
    with RedisServer(options=("--user", "default", "on", "nopass", "~*", "+@all", "-@write")) as server:
        (said,) = found(examined("sglang", server.url, host=1), "store", "wrong")
        assert "may not be written to" in said
        assert found(examined("sglang", f"{server.url}?write=no", host=1), "store", "well")


@pytest.mark.usefixtures("quick")
def test_without_torch_the_rest_is_still_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asynccache.memory.pools", None)  # as if it could not be imported
    report = examined("vllm", "memory:", host=1)
    assert found(report, "memory", "wrong")
    assert found(report, "store", "well")
