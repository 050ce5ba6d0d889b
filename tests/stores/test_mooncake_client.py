"""The door to the library: no call gets in before set-up or after close. The library is a stand-in here, for the real
one would end the process; ``test_mooncake_process`` asks that one, in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
from asynccache_backends.mooncake.client import ENVIRONMENT, MooncakeClient, MooncakeSettings, library, prepare

from asynccache.errors import ConfigError, Unavailable
from asynccache.storage import HostPort

OPTIONS = MooncakeSettings(master=HostPort("10.0.0.1", 50051), buffer=1 << 20)


class Library:
    """Notes what it is asked."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[str] = []
        self.arguments: tuple[object, ...] = ()
        self._code = code

    def setup(self, *args: object) -> int:
        self.calls.append("setup")
        self.arguments = args
        return self._code

    def close(self) -> int:
        self.calls.append("close")
        return 0


def ready(library: Library) -> MooncakeClient:
    return MooncakeClient(OPTIONS, "10.0.0.7", type("Module", (), {"MooncakeDistributedStore": lambda: library}))


def test_set_up_opens_the_door() -> None:
    library = Library()
    client = ready(library)
    with client as store:
        assert store is library
    assert library.arguments == ("10.0.0.7", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", "10.0.0.1:50051")


def test_a_failed_set_up_leaves_no_client() -> None:
    library = Library(-1)
    with pytest.raises(Unavailable, match=r"10\.0\.0\.1:50051"):
        ready(library)
    assert library.calls == ["setup"]


def test_a_closed_client_lets_nobody_in_and_is_closed_once() -> None:
    library = Library()
    client = ready(library)
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="CLOSED"), client:
        pytest.fail("inside")
    assert library.calls == ["setup", "close"]


def test_close_waits_for_those_inside_and_lets_nobody_else_in() -> None:
    library = Library()
    client = ready(library)
    inside, leave = Event(), Event()

    def call() -> None:
        with client:
            inside.set()
            leave.wait(10)

    with _thread(call):
        assert inside.wait(10)
        with _thread(client.close) as closing:
            while client.state != "CLOSING":
                leave.wait(0.001)
            with pytest.raises(Unavailable, match="CLOSING"), client:
                pytest.fail("inside")
            assert library.calls == ["setup"]
            assert closing.is_alive()
            leave.set()
    assert library.calls == ["setup", "close"]
    assert repr(client) == "MooncakeClient(10.0.0.1:50051, CLOSED, users=1, calls=0)"


def test_an_error_inside_opens_the_way_out() -> None:
    client = ready(Library())
    with pytest.raises(ZeroDivisionError), client:
        raise ZeroDivisionError
    client.close()
    assert client.state == "CLOSED"


def test_the_environment_bounds_the_client_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "250")
    prepare()
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "250"
    assert os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_a_client_that_is_not_installed_is_a_setting_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match="pip install 'mooncake-transfer-engine"):
        library()


def test_a_missing_shared_library_is_a_setting_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "mooncake", Broken())
    with pytest.raises(ConfigError, match="apt-get install libibverbs1 libnuma1"):
        library()


@contextmanager
def _thread(work: Any) -> Iterator[Thread]:
    thread = Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(10)
        assert not thread.is_alive()
