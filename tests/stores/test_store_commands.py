"""``asynccache store`` and ``asynccache bench store`` on the real stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asynccache.storage import HEADER_BYTES
from asynccache.testing.backend_suite import LAYOUT, page_key

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
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
STORES = [
    "file", "host_process", "redis_server", "redis_cluster", "s3_server", "mooncake_master",
    pytest.param("ceph_server", marks=pytest.mark.slow),
]


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    """Which store, and after a ``?`` options for its URL."""
    name: str = request.param
    return name


@pytest.fixture
def commands(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> Commands:
    """Runs the given steps on an empty store, all in one child."""
    environment = dict(os.environ)
    name, _, options = store.partition("?")
    if name == "file":
        url = f"file:{tmp_path}/kv?capacity=256MiB"
    else:
        server = request.getfixturevalue(name)
        url = f"{server.url}?{options}" if options else server.url
        environment |= getattr(server, "client_environment", {})
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in (".", "backends", "scheduler_shim"))

    def run(*steps: str) -> list[Said]:
        words = [["store", "clear", "URL", "--yes"], *(step.split() for step in steps)]
        done = subprocess.run(
            [sys.executable, str(CHILD), url], input=json.dumps([["fill", "1", "0"], *words]), env=environment,
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        answers = [Said(*answer) for answer in json.loads(done.stdout[done.stdout.index("[["):])]
        assert answers[1].status == 0, answers[1]
        return answers[2:]

    return run


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_store_is_looked_at_verified_and_cleared(commands: Commands) -> None:
    _, ls, some, stat, verify, again, person, clear, empty = commands(
        f"fill {GOOD} {BAD}", "store ls URL --json -", "store ls URL --json - --limit 5", "store stat URL --json -",
        "store verify URL --json -", "store verify URL", "store stat URL", "store clear URL --yes", "store ls URL",
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

    assert (verify.status, verify.json["pages"], verify.json["bad"], verify.json["unread"]) == (1, len(keys), BAD, 0)
    assert again.status == 0
    assert again.out.startswith(f"OK: {2 * GOOD} pages, ")
    assert f": {2 * GOOD} pages, " in person.out
    assert clear.status == 0
    assert empty.out == "0 pages, 0 B\n"


@pytest.mark.parametrize("store", ["file"], indirect=True)
def test_old_pages_are_collected(commands: Commands) -> None:
    _, young, dry, gc, empty = commands(
        f"fill {GOOD} 0", "store gc URL --older-than 1h --json -", "store gc URL --older-than 0s --dry-run --json -",
        "store gc URL --older-than 0s --json -", "store ls URL",
    )  # fmt: skip
    assert (young.status, young.json["pages"]) == (0, 0)
    pages = 2 * GOOD
    size = GOOD * (FULL + ODD + 2 * HEADER_BYTES)
    assert (dry.json["pages"], dry.json["size"], dry.json["unknown"]) == (pages, size, 0)
    assert (gc.status, gc.json["pages"]) == (0, pages)
    assert empty.out == "0 pages, 0 B\n"


@pytest.mark.parametrize("store", ["host_process", "redis_server", "mooncake_master", "s3_server"], indirect=True)
def test_a_store_that_has_no_waste_says_so(commands: Commands) -> None:
    _, gc, old, ls = commands(
        f"fill {GOOD} 0", "store gc URL", "store gc URL --older-than 0s", "store ls URL --json -"
    )
    assert (gc.status, old.status) == (2, 2)
    assert "nothing that gc could remove" in old.err
    assert ls.lines[-1]["total"]["pages"] == 2 * GOOD


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_store_is_measured_and_left_as_it_was(commands: Commands) -> None:
    _, bench, ls = commands(
        f"fill {GOOD} 0", "bench store URL --page-sizes 64KiB --bytes 1MiB --repeat 1 --batch 4 --json -",
        "store ls URL --json -",
    )  # fmt: skip
    assert bench.status == 0, bench.err
    [size] = bench.json["sizes"]
    assert size["mismatches"] == 0
    assert size["put"]["gb_per_s"] > 0
    assert size["get"]["gb_per_s"] > 0
    assert size["exists"]["pages_per_s"] > 0
    assert ls.lines[-1]["total"]["pages"] == 2 * GOOD


@pytest.mark.parametrize("store", ["host_process?label=chat"], indirect=True)
def test_a_label_is_told_with_what_it_was_asked_for(commands: Commands) -> None:
    _, before, _, after = commands(f"fill {GOOD} 0", "store stat URL", "store verify URL", "store stat URL")
    [unasked], [asked] = ([line for line in one.out.splitlines() if "label chat" in line] for one in (before, after))
    assert unasked.startswith(f"  label chat: {2 * GOOD} pages, ")
    assert "hit" not in unasked
    assert asked == f"{unasked}, 100.0 % of {2 * GOOD} pages hit"
