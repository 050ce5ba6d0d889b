"""``up.py``, by which people and CI start the real stores, and commands of ``asynccache`` on them."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asynccache.storage import HEADER_BYTES
from asynccache.testing.backend_suite import LAYOUT, page_key
from tests.stores import up
from tests.stores.kinds import ATTACHED, store_url
from tests.stores.redis_server import RedisServer
from tests.stores.server import CannotStart, Entered, listens, ours

# ``up.py``, by which people and CI start the real stores.


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
    first = run(folder, "up", "--only", "redis")
    assert first.returncode == 0, first.stderr
    port = int(re.findall(r"redis://127\.0\.0\.1:(\d+)", first.stdout)[0])
    assert listens(port)                                # the script has ended, the server has not
    again = run(folder, "up", "--only", "redis")
    assert again.stdout == first.stdout
    assert "starting" not in again.stderr
    [(pid, _)] = json.loads((folder / "running.json").read_text())["redis"]["groups"]
    os.kill(pid, signal.SIGSTOP)                        # also one that hangs is ended
    down = run(folder, "down")
    assert (down.returncode, down.stdout) == (0, "redis: ended\n")
    assert not listens(port)
    assert not (folder / "redis").exists()
    assert run(folder, "down").stdout == ""


def test_one_that_died_is_said_and_started_again(folder: Path) -> None:
    RedisServer.installed()
    assert run(folder, "up", "--only", "redis").returncode == 0
    stores = up.Stores(folder)
    [(pid, started)] = stores.running["redis"]["groups"]
    os.kill(pid, signal.SIGKILL)
    while up.started_at(pid):
        pass
    again = run(folder, "up", "--only", "redis")
    assert (again.returncode, again.stderr) == (0, "redis: starting\n")
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

    def start(kind: up.Kind, folder: Path) -> up.Running:
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


@pytest.mark.parametrize("kind", [*up.KINDS.values(), up.CEPH], ids=lambda kind: kind.name)
def test_every_store_has_a_class_that_runs_it(kind: up.Kind) -> None:
    assert issubclass(getattr(importlib.import_module(f"tests.stores.{kind.module}"), kind.name), Entered)


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


# ``asynccache store`` and ``asynccache bench store`` on the real stores.


CHILD = Path(__file__).with_name("store_commands_child.py")

GOOD, BAD = 40, 3
FULL, ODD = LAYOUT.page_bytes["full"], LAYOUT.page_bytes["odd"]


class Said(NamedTuple):
    """What a command answered."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its only JSON value."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Its JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Commands = Callable[..., list[Said]]
STORES = [*ATTACHED, pytest.param("ceph", marks=pytest.mark.slow)]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """Which store, and after a ``?`` options for its URL."""
    name: str = request.param
    return name


@pytest.fixture
def commands(request: pytest.FixtureRequest, store: str) -> Commands:
    """Runs the given steps on an empty store, all in one child."""
    name, _, options = store.partition("?")
    url = store_url(name, request) + (f"?{options}" if options else "")

    def run(*steps: str) -> list[Said]:
        words = [["store", "clear", "URL", "--yes"], *(step.split() for step in steps)]
        done = subprocess.run(
            [sys.executable, str(CHILD), url], input=json.dumps([["fill", "1", "0"], *words]), env=ours(),
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers = [Said(*answer) for answer in json.loads(done.stdout[done.stdout.index("[["):])]
        assert answers[1].status == 0, answers[1]
        return answers[2:]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_store_is_looked_at_measured_verified_and_cleared(store: str, commands: Commands) -> None:
    """One that has no waste says so; a measurement leaves it as it was."""
    gc = "store gc URL", "store gc URL --older-than 0s"
    _, ls, some, stat, bench, verify, again, *wasted, person, clear, empty = commands(
        f"fill {GOOD} {BAD}", "store ls URL --json -", "store ls URL --json - --limit 5", "store stat URL --json -",
        "bench store URL --page-sizes 64KiB --bytes 1MiB --repeat 1 --batch 4 --json -", "store verify URL --json -",
        "store verify URL", *(gc if store != "file" else ()), "store stat URL", "store clear URL --yes", "store ls URL",
    )  # fmt: skip
    *pages, total = ls.lines
    keys = {page_key(f"good {n}", pool).key.hex(): size
            for n in range(GOOD) for pool, size in (("full", FULL), ("odd", ODD))}
    keys |= {page_key(f"bad {n}", "full").key.hex(): FULL for n in range(BAD)}
    assert {page["key"]: page["size"] - HEADER_BYTES for page in pages} == keys
    assert total == {"total": {"pages": len(keys), "bytes": sum(keys.values()), "more": False}}
    assert [len(some.lines), some.lines[-1]["total"]["more"]] == [6, True]

    found = stat.json
    assert (found["pages"], found["bytes"]) == (len(keys), sum(keys.values()))
    assert (found["ok"], found["breaker"]) == (True, "closed")
    assert found["by_page_size"] == [{"page_bytes": ODD, "pages": GOOD}, {"page_bytes": FULL, "pages": GOOD + BAD}]
    assert sum(found["by_age"].values()) == len(keys)
    assert set(found["by_age"]) <= {"an hour", "unknown"}
    assert 0 < found["probe"]["median_ms"] <= found["probe"]["worst_ms"]

    [size] = bench.json["sizes"]
    assert (bench.status, size["mismatches"]) == (0, 0), bench.err
    assert min(size["put"]["gb_per_s"], size["get"]["gb_per_s"], size["exists"]["pages_per_s"]) > 0

    assert (verify.status, verify.json["pages"], verify.json["bad"], verify.json["unread"]) == (1, len(keys), BAD, 0)
    assert again.status == 0
    assert again.out.startswith(f"OK: {2 * GOOD} pages, ")
    assert all(one.status == 2 and "nothing that gc could remove" in one.err for one in wasted)
    assert f": {2 * GOOD} pages, " in person.out
    assert clear.status == 0
    assert empty.out == "0 pages, 0 B\n"


@pytest.mark.parametrize("store", ["host?label=chat"], indirect=True)
def test_a_label_is_told_with_what_it_was_asked_for(commands: Commands) -> None:
    _, before, _, after = commands(f"fill {GOOD} 0", "store stat URL", "store verify URL", "store stat URL")
    [unasked], [asked] = ([line for line in one.out.splitlines() if "label chat" in line] for one in (before, after))
    assert unasked.startswith(f"  label chat: {2 * GOOD} pages, ")
    assert "hit" not in unasked
    assert asked == f"{unasked}, 100.0 % of {2 * GOOD} pages hit"
