"""Tests that need a process of their own: two that share a store, other options, misuse of the real client, and its
end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stores.mooncake_child import Child
from tests.stores.mooncake_server import MooncakeMaster, answer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def other_master() -> Iterator[MooncakeMaster]:
    """A second store."""
    with MooncakeMaster() as master:
        yield master


def segments(master: MooncakeMaster) -> int:
    return len(answer(master.admin, "/get_all_segments").split())


def test_two_processes_share_pages(mooncake_master: Any) -> None:
    with Child() as one, Child() as two:
        for child in (one, two):
            assert "error" not in child.ask("open", url=mooncake_master.url, namespace="two.")
        assert one.ask("put", count=100)["HIT"] == 100
        got = two.ask("get", count=120)
        assert (got["HIT"], got["MISS"], got["wrong"]) == (100, 20, 0)


def test_two_processes_may_write_the_same_pages_at_once(mooncake_master: Any) -> None:
    with Child() as one, Child() as two:
        children = (one, two)
        for child in children:
            assert "error" not in child.ask("open", url=mooncake_master.url, namespace="race.")
        for attempt in range(5):
            for child in children:
                child.tell("put", count=200, name=f"{attempt}/")
            assert [child.answer()["HIT"] for child in children] == [200, 200]
            for child in children:
                got = child.ask("get", count=200, name=f"{attempt}/")
                assert (got["HIT"], got["wrong"]) == (200, 0)


def test_namespaces_never_meet(mooncake_master: Any) -> None:
    with Child() as one, Child() as two:
        one.ask("open", url=mooncake_master.url, namespace="tenant1.")
        two.ask("open", url=mooncake_master.url, namespace="tenant2.")
        assert one.ask("put", count=10)["HIT"] == 10
        assert two.ask("get", count=10)["MISS"] == 10


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
