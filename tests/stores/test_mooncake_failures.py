"""Masters and owners of segments that are killed, hung, restarted and full. The cache is in a child process, which
also says how long its loop stood still meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.stores.mooncake_child import Child
from tests.stores.mooncake_server import MooncakeMaster

pytestmark = pytest.mark.slow

TTL = 4                                            # seconds after which the master gives a silent owner up
LAG = 0.5                                          # the loop may stand still so long, on a machine that is busy


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    """A small store."""
    with MooncakeMaster(segment=64, ttl=TTL) as master:
        yield master


@pytest.fixture
def child(master: MooncakeMaster) -> Iterator[Child]:
    """With 64 pages stored."""
    with Child() as process:
        assert "error" not in process.ask("open", url=master.url)
        assert process.ask("put", count=64)["HIT"] == 64
        yield process


def until(what: Callable[[], bool], seconds: float) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.2)


def test_the_master_is_killed_and_comes_back_empty(master: MooncakeMaster, child: Child) -> None:
    master.kill()
    first = child.ask("put", count=64, name="new")
    assert first["error"] == "Unavailable"
    assert (first["seconds"] < 10, first["lag"] < LAG) == (True, True), first
    for order in ("get", "exists", "put"):
        later = child.ask(order, count=64)
        assert later["error"] == "Unavailable"
        assert later["seconds"] < 1, "the client was asked, and not the master's port"
    master.start()
    until(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    got = child.ask("get", count=64)
    assert (got["HIT"], got["wrong"]) == (64, 0)


def test_the_master_hangs_and_goes_on(master: MooncakeMaster, child: Child) -> None:
    master.hang()
    for order in ("get", "exists", "put"):
        answered = child.ask(order, count=64)
        assert answered["error"] == "Timeout"
        assert answered["seconds"] < 3, answered
        assert answered["lag"] < LAG, answered
    master.resume()
    until(lambda: child.ask("get", count=64).get("HIT") == 64, 10)
    assert child.ask("get", count=64)["wrong"] == 0


def test_a_get_of_a_hung_master_that_is_cancelled_lets_go_soon(master: MooncakeMaster, child: Child) -> None:
    master.hang()
    answered = child.ask("cancel", count=64, after=0.2)
    assert answered["cancelled"]
    assert answered["held"] < 3
    again = child.ask("cancel", count=64, after=0.2)
    assert again["held"] < 0.2, "who waits for a greeting holds no buffer"
    master.resume()


def test_a_cache_that_opens_at_a_hung_master_freezes_nothing(master: MooncakeMaster) -> None:
    master.hang()
    with Child() as child:
        opened = child.ask("open", url=master.url)
        assert opened["error"] == "Timeout"
        assert opened["seconds"] < 3
        assert opened["lag"] < LAG
        master.resume()
        until(lambda: "error" not in child.ask("open", url=master.url), 10)


def test_the_owner_of_a_segment_is_killed(master: MooncakeMaster, child: Child) -> None:
    assert master.owner is not None
    master.owner.kill()
    for order in ("get", "put"):
        answered = child.ask(order, count=64, name="" if order == "get" else "new")
        assert answered["error"] == "Unavailable"
        assert answered["seconds"] < 10
    until(lambda: child.ask("get", count=64).get("MISS") == 64, 3 * TTL + 5)
    master.owner.start()
    until(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    assert child.ask("get", count=64)["wrong"] == 0


def test_the_owner_of_a_segment_hangs(master: MooncakeMaster, child: Child) -> None:
    """The buffers are held until the client's transfers time out; the loop is not."""
    assert master.owner is not None
    master.owner.hang()
    answered = child.ask("get", count=64)
    assert answered["error"] == "Unavailable"
    assert (answered["seconds"] < 20, answered["lag"] < LAG) == (True, True), answered
    until(lambda: child.ask("get", count=64).get("MISS") == 64, 3 * TTL + 5)
    master.owner.resume()
    until(lambda: child.ask("put", count=64).get("HIT") == 64, 20)
    assert child.ask("get", count=64)["wrong"] == 0


def test_a_full_store_fails_pages_or_evicts_and_never_lies(master: MooncakeMaster, child: Child) -> None:
    """Nearly twice what it holds."""
    stored = 0
    for batch in range(30):
        answered = child.ask("put", count=256, name=f"{batch}/")
        assert "error" not in answered, answered
        assert answered["seconds"] < 5
        stored += answered.get("HIT", 0)
    assert stored > 64 << 20 >> 14, "nothing was evicted"
    found = 0
    for batch in range(30):
        got = child.ask("get", count=256, name=f"{batch}/")
        assert got["wrong"] == 0
        found += got.get("HIT", 0)
    assert 0 < found < stored
    assert child.ask("stats")["full_waits"] > 0
