"""vLLM's real engines on one host process: what one has computed all of them hit, also one that was killed and started
again, with nothing but the host process's memory between them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process
from tests.stores.server import free_port
from tests.vllm.engine_kit import BLOCK, Answer, Models, RunningEngine, installed, prompt, tier

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(60),
]

WHOLE = 16 * BLOCK
BACK_WITHIN = 60.0


def counts(server: HostProcess) -> dict[str, float]:
    """What the server counts, once nothing is being written."""
    return asyncio.run(server.settled())


def test_two_engines_find_what_the_other_stored_and_so_does_one_that_was_killed(
    models: Models, tmp_path: Path
) -> None:
    expected, model = models.answers("llama"), models.folder("llama")
    with server_process(socket_path(), "64MiB") as server:
        assert counts(server)["pages"] == 0
        tiers = [tier(server.url)]
        with RunningEngine(model, tmp_path, tiers=tiers) as first:
            with RunningEngine(model, tmp_path, tiers=tiers) as second:
                hits = shared(first, second, 0, expected[0])
                assert counts(server)["stored"] == hits, "what both have is there once"
                assert shared(second, first, 1, expected[1]) == hits
                second.kill()
            with RunningEngine(model, tmp_path, tiers=tiers) as again:
                for number in (1, 0):
                    found = again.generate(prompt(number))
                    assert found.cached == WHOLE
                    found.same_as(expected[number])
                assert again.chunks("loaded_chunks") == {"hit": 2 * hits}
                again.generate(prompt(3)).same_as(expected[3])
            first.generate(prompt(0)).same_as(expected[0])
        after = counts(server)
        assert (after["evicted"], after["no_room"], after["damaged"], after["malformed"]) == (0, 0, 0, 0)
        assert after["hits"] == 4 * hits
        assert not [name for name in after if "." in name], "there is no store behind it"
        assert server.stop() == 0


def shared(one: RunningEngine, other: RunningEngine, number: int, expected: Answer) -> int:
    """``one`` computes and stores a prompt, which ``other`` has never seen, and then loads. Returns how many chunks."""
    cold = one.generate(prompt(number))
    assert cold.cached == 0
    cold.same_as(expected)
    one.quiet()
    before = other.chunks("loaded_chunks").get("hit", 0)
    found = other.generate(prompt(number))
    assert found.cached == WHOLE
    found.same_as(expected)
    loaded = other.chunks("loaded_chunks")["hit"] - before
    assert loaded > 0
    return loaded


def test_an_engine_goes_on_without_its_host_process_and_hits_again_with_the_next(
    models: Models, tmp_path: Path
) -> None:
    """The engine starts before there is a host process, computes, and uses the one that comes, is killed and comes
    again."""
    expected, model = models.answers("llama"), models.folder("llama")
    server = HostProcess(socket_path(), "64MiB")
    with RunningEngine(model, tmp_path, tiers=[tier(server.url)]) as engine:
        alone = engine.generate(prompt(0))
        alone.same_as(expected[0])
        for _ in range(2):
            server.start()
            try:
                counts(server)
                hit_again(engine, expected[0])
            finally:
                server.kill()
            engine.forget()
            alone = engine.generate(prompt(0))
            assert alone.cached == 0
            alone.same_as(expected[0])


def hit_again(engine: RunningEngine, expected: Answer) -> None:
    """Ask until the answer comes from the host process: the engine stores prompts as soon as it has noticed it."""
    until = time.monotonic() + BACK_WITHIN
    while True:
        engine.forget()
        found = engine.generate(prompt(0))
        found.same_as(expected)
        if found.cached == WHOLE:
            return
        assert time.monotonic() < until, f"no hit any more: {engine.log[-2000:]}"


def test_a_router_finds_an_engines_blocks_by_vllms_own_hashes_also_when_the_engine_has_gone(
    models: Models, tmp_path: Path
) -> None:
    pytest.importorskip("zmq")
    from asynccache.events import BlockStored, EventStream, Fleet, Subscriber

    ports = [f"tcp://127.0.0.1:{free_port()}" for _ in range(4)]
    device, machine = EventStream(*ports[:2]), EventStream(*ports[2:])
    bound = [port.replace("127.0.0.1", "*") for port in ports]  # vLLM connects to what has no *
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": bound[0], "replay_endpoint": bound[1]}
    with server_process(socket_path(), "64MiB", "--events", ports[2], "--events-replay", ports[3]) as server:
        counts(server)
        with Fleet() as fleet:
            fleet.add("engine", [device, machine])
            fleet.add("machine", [machine])
            with RunningEngine(models.folder("llama"), tmp_path, tiers=[tier(server.url)], events=events) as engine:
                engine.generate(prompt(0))
                engine.quiet()
                with Subscriber(*ports[:2]) as subscriber:
                    told = [event for _, batch in subscriber.catch_up() for event in batch.events]
                blocks = [block for event in told if isinstance(event, BlockStored) and event.medium == "GPU"
                          for block in event.block_hashes][:16]  # fmt: skip
                assert len(set(blocks)) == 16
                end = time.monotonic() + BACK_WITHIN
                while [*fleet.hits(blocks).values()] != [(16, 0, 0), (0, 16, 0)]:
                    assert time.monotonic() < end, (fleet.hits(blocks), fleet.stats())
                    time.sleep(0.05)
                engine.kill()
            while [*fleet.hits(blocks).values()] != [(0, 16, 0), (0, 16, 0)]:
                assert time.monotonic() < end, (fleet.hits(blocks), fleet.stats())
                time.sleep(0.05)
