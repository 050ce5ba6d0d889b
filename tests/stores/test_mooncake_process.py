"""Mooncake in processes of their own: masters and owners that are killed, hung, full; two that share a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.stores.mooncake_child import Child
from tests.stores.mooncake_server import MooncakeMaster, answer

pytestmark = pytest.mark.slow

# Tests that need a process of their own: two that share a store, other options, misuse of the real client, and its
# end.


@pytest.fixture(scope="module")
def other_master() -> Iterator[MooncakeMaster]:
    """A second store."""
    with MooncakeMaster() as master:
        yield master


def segments(master: MooncakeMaster) -> int:
    return len(answer(master.admin, "/get_all_segments").split())


def test_the_real_client_is_not_called_after_close(mooncake_master: Any) -> None:
    with Child() as child:
        answered = child.ask("misuse", url=mooncake_master.url)
        assert (answered["refused"], answered["state"]) == (1, "CLOSED")
        assert child.end() == 0


def test_another_store_only_when_the_first_is_not_used(mooncake_master: Any, other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="first.")
        refused = child.ask("open", url=other_master.url)
        assert refused["error"] == "ConfigError"
        assert "master" in refused["message"]
        assert child.ask("put", count=5)["HIT"] == 5
        child.ask("close")
        assert "error" not in child.ask("open", url=other_master.url)
        assert child.ask("get", count=5)["MISS"] == 5
        assert child.ask("put", count=5)["HIT"] == 5


def test_a_segment_is_contributed_and_leaves_with_the_process(other_master: Any) -> None:
    """At once, and not when the master has missed it for a while."""
    before = segments(other_master)
    with Child() as child:
        assert "error" not in child.ask("open", url=other_master.url, segment="64MiB", namespace="own.")
        assert segments(other_master) == before + 1
        assert child.ask("put", count=100)["HIT"] == 100
        child.ask("close")
        assert child.end() == 0
        began = time.monotonic()
        while segments(other_master) != before:
            assert time.monotonic() - began < 3
            time.sleep(0.05)


def test_set_up_freezes_the_loop_shortly(mooncake_master: Any) -> None:
    with Child() as child:
        opened = child.ask("open", url=mooncake_master.url, namespace="freeze.")
        assert opened["lag"] < 2, opened
        again = child.ask("open", url=mooncake_master.url, namespace="freeze2.")
        assert again["lag"] < 0.5, again


def test_a_process_that_ends_while_a_call_is_under_way_ends_well(other_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=other_master.url, namespace="inside.")
        other_master.hang()
        try:
            child.ask("leave_inside")
            assert child.end() == 0
        finally:
            other_master.resume()


def test_a_process_that_ends_without_closing_anything_ends_well(mooncake_master: Any) -> None:
    with Child() as child:
        child.ask("open", url=mooncake_master.url, namespace="end.")
        child.ask("put", count=5)
        assert child.end() == 0


# Masters and owners of segments that are killed, hung, restarted and full. The cache is in a child process, which
# also says how long its loop stood still meanwhile.


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
