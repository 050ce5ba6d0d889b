"""vLLM's ``kv_hints`` under its real manager: what they come to in a host process, and that none of them does harm."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_hints", reason="vLLM is not installed, or has no hints: make test-vllm")

from asynccache_vllm.counts import HINTED, HINTS, STORED
from asynccache_vllm.namespace import block_named
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

from asynccache.host.server import HostServer
from asynccache.storage.contract import named_key
from tests.host.host_kit import beside
from tests.vllm.tier_kit import Scheduler, config, keys_of, scheduler

TOKENS = 16  # of a chunk


def hints(*actions: tuple[Any, Any], version: Any = "1.0") -> KvHintsEnvelope:
    made = [KvHintAction(f"a{at}", kind, version, said) for at, (kind, said) in enumerate(actions)]
    return KvHintsEnvelope("0.1", "m", made)


class Hinting(Scheduler):
    """A scheduler whose requests carry hints; it notes where chunks end, as vLLM's does."""

    def request(self, keys: list[Any], envelope: Any = None) -> ReqContext:
        request = self.begin(kv_hints=envelope)
        for at, key in enumerate(keys):
            request.set_offload_key_position(key, (at + 1) * TOKENS)
        return request

    def turn(self, keys: list[Any], envelope: Any = None) -> int:
        """Serve a request: what is found is loaded, the rest computed and stored. Returns how many were found."""
        request = self.request(keys, envelope)
        found = self.load(keys, request)
        self.store(keys[found:], request)
        self.end(request)
        self.settle()
        self.heard()
        return found


@contextmanager
def made_on(url: str) -> Iterator[Hinting]:
    made = Hinting(config({"storage": url, "namespace": "tiny"}))
    yield made
    made.shutdown()


@contextmanager
def playing(**more: Any) -> Iterator[tuple[HostServer, Hinting]]:
    """A host process, and a manager on it."""
    with beside(**{"memory": 1 << 20, **more}) as server, made_on(f"host:{server.path}") as made:
        yield server, made


def page_of(made: Hinting, key: bytes) -> bytes:
    """The name of a chunk's page in the server."""
    return named_key(sha256(key + made.tier._pages._pool(None).digest).digest(), block_named("", key))


def where(server: HostServer, made: Hinting, keys: list[Any]) -> list[bool]:
    """Which chunks are in the server's memory."""
    return [page_of(made, key) in server.table.index for key in keys]


def test_chunks_of_a_conversation_that_has_ended_go_first_and_those_that_others_have_too_stay() -> None:
    with playing() as (server, made):
        system = keys_of(3, "system")
        one, two = system + keys_of(4, "one"), system + keys_of(4, "two")
        assert made.turn(one, hints()) == 0
        made.reset()
        assert made.turn(two) == 3
        assert made.turn(one[:7] + keys_of(2, "on"), hints(("kv.end", {}))) == 7
        made.step_until(lambda: server.table.counts["ended"] == 6)
        order = list(server.table.index)[:6]
        assert all(where(server, made, one + keys_of(2, "on")))
        assert order == [page_of(made, key) for key in (one[3:] + keys_of(2, "on"))[::-1]]


def test_what_is_kept_is_there_when_all_others_have_gone_and_start_and_end_are_tokens() -> None:
    with playing() as (server, made):
        kept = keys_of(8, "kept")
        made.turn(kept, hints(("kv.retain", {"duration": 600, "end": 5 * TOKENS})))
        made.step_until(lambda: server.table.counts["kept"] == 5)
        at = 0
        while server.table.counts["evicted"] < 200:
            made.turn(keys_of(8, f"more {at}"))
            at += 1
        assert where(server, made, kept) == [True] * 5 + [False] * 3
        ended = keys_of(8, "ended")
        made.turn(ended, hints(("kv.end", {"start": 6 * TOKENS})))
        made.step_until(lambda: server.table.counts["ended"] == 2)
        made.step_until(lambda: made.heard()[f"{HINTED}:('hit',)"] == 7)
        assert made.turn(kept) == 5


def test_a_prefetch_has_the_chunks_in_memory_before_the_request_is_scheduled(tmp_path: Path) -> None:
    with playing(stores=[f"file:{tmp_path}/kv?capacity=64MiB"]) as (server, made):
        keys = keys_of(6, "prefetched")
        made.turn(keys)
        made.reset()
        behind = server.behind
        assert behind is not None
        made.step_until(lambda: behind.counts().get("file.written") == 6)
        server.table.clear()
        named = [bytes(key[:-4]).hex() for key in keys]
        request = made.request([], hints(("kv.prefetch", {"block_hashes": named})))
        made.step_until(lambda: where(server, made, keys) == [True] * 6)
        made.step()
        made.step_until(lambda: all(made.tier._lookups.ask(key, "r", 0.0).value == "hit" for key in keys))
        made.manager.on_request_finished(request)
        server.table.clear()
        assert made.turn(keys, hints(("kv.prefetch", {}))) == 6
        assert server.table.counts["prefetched"] == 12


def test_what_is_not_to_be_stored_is_not() -> None:
    with playing() as (server, made):
        made.turn(keys_of(5, "secret"), hints(("kv.skip_store", {})))
        made.turn(keys_of(3, "other"))
        assert len(server.table.index) == 3
        assert made.heard()[f"{STORED}:('skipped',)"] == 5
        assert not made.tier._hints
        assert not made.tier._storing


SECONDS: list[Any] = [-1, 0, True, "1", float("nan"), None, [], {}]
POSITIONS: list[Any] = [-1, True, "1", 1.5, 10**30, []]
NAMED: list[Any] = ["00", ["zz"], [1], [""], {}, [None], ["0" * 3]]
DIRECTIVES: list[Any] = [3, [3], [{}], [{"priority": "9"}], [{"priority": 1}], [{"priority": 1, "duration": 1}] * 65]
ABSURD: list[Any] = [
    "no envelope", 7, KvHintsEnvelope("0.1", "m", None), KvHintsEnvelope("0.1", "m", [None, 3, "kv.end", {}]),
    hints(("kv.demote", {})), hints(("kv.retain", {"duration": 1}), version="9.0"), hints(("kv.end", {}), version=3),
    hints(("kv.retain", None)), hints(("kv.retain", {})), hints((["kv.end"], {})),
    *(hints(("kv.retain", {"duration": one})) for one in SECONDS),
    *(hints(("kv.retain", {"duration": 1, "end": one})) for one in POSITIONS),
    *(hints(("kv.end", {"start": one})) for one in POSITIONS),
    *(hints(("kv.prefetch", {"block_hashes": one})) for one in NAMED),
    *(hints(("kv.retain", {"directives": one})) for one in DIRECTIVES),
]  # fmt: skip


def test_absurd_hints_change_nothing_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.asynccache"), playing() as (server, made):
        keys = keys_of(4, "text")
        made.turn(keys)
        for one in ABSURD:
            made.reset()
            assert made.turn(keys, one) == 4
        told = made.heard()
        bad = told[f"{HINTS}:('unknown',)"] + told[f"{HINTS}:('malformed',)"]
        assert bad == len(ABSURD) + 3, "one envelope has four"
        assert told[f"{HINTS}:('unknown',)"] == 2
        assert not any(name.startswith(HINTED) for name in told)
        assert server.table.kept_bytes == server.table.counts["ended"] == 0
    records = {id(one): one for one in caplog.records}.values()  # each is there twice after some other tests
    said = [one.getMessage() for one in records if "kv_hints" in one.getMessage()]
    assert len(said) == len(set(said)) == 2


def test_huge_times_and_many_actions_keep_no_more_than_the_server_allows() -> None:
    with playing() as (server, made):
        for at in range(20):
            many = [("kv.retain", {"duration": 10**400})] * 70
            made.turn(keys_of(8, f"{at}"), hints(*many))
        assert server.table.kept_bytes <= server.table.usable * 4096 // 4
        assert made.heard()[f"{HINTS}:('malformed',)"] == 20 * 6


def test_stores_that_take_no_hints_are_told_nothing_and_it_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    with made_on(f"file:{tmp_path}/kv?capacity=64MiB") as made:
        for _ in range(3):
            made.turn(keys_of(4), hints(("kv.retain", {"ttl_seconds": 5}), ("kv.end", {}), ("kv.prefetch", {})))
        told = made.heard()
        assert told[f"{HINTED}:('unheard',)"] == 3 * 4 * 3 - 2 * 4, "what host memory has is looked up in no store"
        assert told[f"{HINTS}:('keep',)"] == told[f"{HINTS}:('ended',)"] == 3
        assert sum("take no hints" in one.getMessage() for one in caplog.records) == 3, "once for each verb"


def test_without_hints_nothing_is_remembered(tmp_path: Path) -> None:
    with scheduler(config({"storage": f"file:{tmp_path}/kv?capacity=64MiB", "namespace": "tiny"})) as plain:
        plain.compute(keys_of(8))
        plain.settle()
        assert len(plain.tier._successors) == 0
