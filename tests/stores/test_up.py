"""``up.py``, by which people and CI start the real stores."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores import up
from tests.stores.redis_server import RedisServer
from tests.stores.server import HOST, CannotStart, listens

SCRIPT = Path(up.__file__)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the stores of a test live; they end with it."""
    yield tmp_path / "stores"
    up.main(["down", "--folder", str(tmp_path / "stores")])


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words, "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)


def test_redis_comes_up_stays_and_goes(folder: Path) -> None:
    RedisServer.installed()
    first = run(folder, "up", "--only", "redis", "--any-port")
    assert first.returncode == 0, first.stderr
    port = int(re.findall(r"redis://127\.0\.0\.1:(\d+)", first.stdout)[0])
    assert listens(port)                                # the script has ended, the server has not
    again = run(folder, "up", "--only", "redis", "--any-port")
    assert again.stdout == first.stdout
    assert "starting" not in again.stderr
    assert run(folder, "status").returncode == 0
    [(pid, _)] = json.loads((folder / "running.json").read_text())["redis"]["groups"]
    os.kill(pid, signal.SIGSTOP)                        # also one that hangs is ended
    down = run(folder, "down")
    assert (down.returncode, down.stdout) == (0, "redis: ended\n")
    assert not listens(port)
    assert not (folder / "redis").exists()
    assert "no store runs" in run(folder, "status").stdout
    assert run(folder, "down").stdout == ""


def test_one_that_died_is_said_and_started_again(folder: Path) -> None:
    RedisServer.installed()
    assert run(folder, "up", "--only", "redis", "--any-port").returncode == 0
    stores = up.Stores(folder)
    [(pid, started)] = stores.running["redis"]["groups"]
    os.kill(pid, signal.SIGKILL)
    while up.started_at(pid):
        pass
    dead = run(folder, "status")
    assert dead.returncode == 1
    assert "DEAD" in dead.stdout
    assert run(folder, "up", "--only", "redis", "--any-port").returncode == 0
    assert [pid, started] not in list(map(list, up.Stores(folder).running["redis"]["groups"]))


def test_a_process_that_only_has_the_number_is_left_alone(folder: Path) -> None:
    stores = up.Stores(folder)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        stores.running["redis"] = {"url": "redis://127.0.0.1:1", "environment": {}, "folder": str(folder / "redis"),
                                   "groups": [(child.pid, up.started_at(child.pid) - 1)]}
        assert not stores.alive("redis")
        assert up.end(stores, "redis")
        assert child.poll() is None
        stores.running["redis"] = {"url": "redis://127.0.0.1:1", "environment": {}, "folder": str(folder / "redis"),
                                   "groups": [(child.pid, up.started_at(child.pid))]}
        assert stores.alive("redis")
        assert up.end(stores, "redis")
        assert child.poll() is not None or child.wait(5) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_a_store_that_cannot_start_is_said_and_the_others_start(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def start(kind: up.Kind, folder: Path, any_port: bool) -> up.Running:
        begun.append(kind.name)
        if kind.name == "RedisServer":
            raise CannotStart("redis-server is not installed: make stores-install")
        return {"url": "s3://b", "environment": {"KEY": "a b"}, "groups": [], "folder": str(folder)}

    monkeypatch.setattr(up, "start", start)
    assert up.main(["up", "--only", "redis,s3", "--folder", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert begun == ["RedisServer", "MotoServer"]
    assert "redis CANNOT START: redis-server is not installed: make stores-install" in err
    assert "s3://b" in out
    assert "export KEY='a b'" in out


def test_a_port_that_somebody_has_is_not_free() -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        port = other.getsockname()[1]
        assert not up.is_free(port)                    # nobody listens there, and still it is taken
    assert up.is_free(port)
    assert not up.is_free(0)                           # of a cluster, which has no usual port


def test_what_the_system_lacks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, path="": None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert up.missing(up.KINDS) == ["libibverbs1", "libnuma1", "redis-server"]
    monkeypatch.setattr("shutil.which", lambda program, path="": f"/usr/bin/{program}")
    assert up.missing({"redis": up.KINDS["redis"]}) == []
    assert up.missing({"mooncake": up.KINDS["mooncake"]}) == ["libibverbs1", "libnuma1"]


@pytest.mark.parametrize(
    ("apt_get", "user", "said"),
    [(False, 0, "there is no apt-get here"), (True, 1000, "sudo apt-get install -y -qq --no-install-recommends a b")],
)
def test_where_installing_is_not_ours_to_do_it_says_how(
    apt_get: bool, user: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "missing", lambda kinds: ["a", "b"])
    monkeypatch.setattr("shutil.which", lambda program: "/usr/bin/apt-get" if apt_get else None)
    monkeypatch.setattr("os.geteuid", lambda: user)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it ran something")

    monkeypatch.setattr("subprocess.run", never)
    assert up.install({}) == 0
    assert said in capsys.readouterr().out


def test_an_unknown_store_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        up.main(["up", "--only", "tea"])
    assert "no such store: tea; there are redis, redis-cluster, s3, mooncake" in capsys.readouterr().err
