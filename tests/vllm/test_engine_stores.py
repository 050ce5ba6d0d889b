"""vLLM's real engine over our stores: it generates the same tokens as without them, does not compute what was stored,
and no store that fails gives a request other tokens, or more to wait than it should."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.host.host_kit import socket_path
from tests.host.host_processes import HostProcess, server_process
from tests.storage.pages_kit import until
from tests.stores.redis_server import RedisServer
from tests.stores.server import free_port
from tests.stores.slow_proxy import SlowProxy
from tests.vllm.engine_kit import BLOCK, ROOT, Answer, Kind, Models, RunningEngine, installed, prompt, tier

pytestmark = [pytest.mark.skipif(not installed(), reason='vLLM is not installed: make test-vllm'), pytest.mark.slow(60)]

# vLLM's real engine over our stores: it generates the same tokens as without them, and does not compute what was
# stored.


WHOLE = 16 * BLOCK
RECOVERS_WITHIN = 60.0


def gives(engine: RunningEngine, number: int, expected: Answer, *, cached: int) -> Answer:
    """The answer to a prompt, which is as expected; so many tokens of the prompt were not computed."""
    answer = engine.generate(prompt(number))
    answer.same_as(expected)
    assert answer.cached == cached
    return answer


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_was_stored_is_served_after_a_reset_and_in_a_new_process(
    kind: Kind, models: Models, tmp_path: Path
) -> None:
    """Gemma 3 has three groups of KV, two of them with sliding windows. Llama runs as ``vllm serve`` does, with the
    engine in a process of its own."""
    expected, model = models.answers(kind), models.folder(kind)
    tiers = [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers, processes=kind == "llama") as engine:
        for number in (0, 1):
            gives(engine, number, expected[number], cached=0)
        assert engine.generate(prompt(0)).cached == WHOLE, "on the device"
        engine.forget(host=False)
        gives(engine, 0, expected[0], cached=WHOLE)
        assert engine.from_tier() == (0, 0), "vLLM's own host tier had it"
        engine.forget()
        gives(engine, 0, expected[0], cached=WHOLE)
        hits, read = engine.from_tier()
        assert hits > 0
        assert read > 0
        assert engine.chunks("loaded_chunks") == {"hit": hits}
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        for number in (1, 0):
            gives(engine, number, expected[number], cached=WHOLE)
        assert engine.from_tier() == (2 * hits, 2 * read)
        longer = [*prompt(0)[:WHOLE], *prompt(2)]
        engine.forget()
        assert engine.generate(longer).cached == WHOLE, "the prefix that is known"
        gives(engine, 3, expected[3], cached=0)


def test_two_ranks_have_a_store_of_their_own(models: Models, tmp_path: Path) -> None:
    """Two ranks lie in a chunk in another way than one, so what one rank stored is a miss for two."""
    expected, model = models.answers("llama"), models.folder("llama")
    tiers = [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        engine.generate(prompt(0)).same_as(expected[0])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
    with RunningEngine(model, tmp_path, tiers=tiers, tp=2) as engine:
        gives(engine, 0, expected[0], cached=0)
        engine.forget()
        gives(engine, 0, expected[0], cached=WHOLE)
        assert engine.from_tier()[0] == 16


def test_other_weights_of_the_same_name_have_a_store_of_their_own(models: Models, tmp_path: Path) -> None:
    """The folder of the model has the same name; what is in its files differs."""
    model = tmp_path / "model"
    tiers = [tier(f"file:{tmp_path}/kv")]
    model.symlink_to(models.folder("llama"))
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        before = engine.generate(prompt(0))
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
    model.unlink()
    model.symlink_to(models.folder("llama", seed=1))
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        after = engine.generate(prompt(0))
        assert after.cached == 0
        assert after.tokens != before.tokens


# vLLM's real engines on one host process: what one has computed all of them hit, also one that was killed and started
# again, with nothing but the host process's memory between them.


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
                    gives(again, number, expected[number], cached=WHOLE)
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
    gives(one, number, expected, cached=0)
    one.quiet()
    before = other.chunks("loaded_chunks").get("hit", 0)
    gives(other, number, expected, cached=WHOLE)
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
                until_it_hits(engine, 0, expected[0])
            finally:
                server.kill()
            engine.forget()
            gives(engine, 0, expected[0], cached=0)


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
                end = time.monotonic() + RECOVERS_WITHIN
                while [*fleet.hits(blocks).values()] != [(16, 0, 0), (0, 16, 0)]:
                    assert time.monotonic() < end, (fleet.hits(blocks), fleet.stats())
                    time.sleep(0.05)
                engine.kill()
            while [*fleet.hits(blocks).values()] != [(0, 16, 0), (0, 16, 0)]:
                assert time.monotonic() < end, (fleet.hits(blocks), fleet.stats())
                time.sleep(0.05)


# vLLM's real engine over a store that fails: no request gets other tokens, or waits for longer than it should.


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def until_it_hits(engine: RunningEngine, number: int, expected: Answer) -> None:
    """Ask until the answer comes from the store, which may need a while to be trusted again. Every answer is right."""
    end = time.monotonic() + RECOVERS_WITHIN
    while True:
        engine.generate(prompt(number)).same_as(expected)  # stored, if it was not
        engine.forget()
        answer = engine.generate(prompt(number))
        answer.same_as(expected)
        if answer.cached == WHOLE:
            return
        assert time.monotonic() < end, f"no hit any more: {engine.log[-2000:]}"
        engine.forget()


def test_flipped_bits_are_computed_again(models: Models, tmp_path: Path) -> None:
    """A bit in each 4 KiB of the store's files: every page is found out, deleted, computed and stored anew."""
    expected = models.answers("llama")
    with RunningEngine(models.folder("llama"), tmp_path, tiers=[tier(f"file:{tmp_path}/kv?direct=off")]) as engine:
        engine.generate(prompt(0)).same_as(expected[0])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
        engine.forget()
        assert flip_bits(tmp_path / "kv") >= 16 * 8, "there are 16 pages of 64 KiB"
        gives(engine, 0, expected[0], cached=0)
        assert engine.chunks("loaded_chunks").get("corrupt", 0) > 0
        assert "corrupt" in engine.log
        engine.forget()
        gives(engine, 0, expected[0], cached=WHOLE)


def flip_bits(folder: Path) -> int:
    """How many were flipped."""
    flipped = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            with open(path, "r+b") as file:
                for at in range(2048, path.stat().st_size, 4096):
                    file.seek(at)
                    byte = file.read(1)
                    if byte.strip(b"\0"):              # room that was never written stays as it is
                        file.seek(at)
                        file.write(bytes([byte[0] ^ 1]))
                        flipped += 1
                os.fsync(file.fileno())
    return flipped


def test_redis_is_killed_in_the_middle_of_a_load(models: Models, tmp_path: Path, redis: RedisServer) -> None:
    """It has said what it has, is asked for it, and is gone. The prompt is computed; so are those that come while it is
    gone. When it is there again, empty, it is used again."""
    expected = models.answers("llama")
    model = models.folder("llama")
    with (SlowProxy(redis.port) as proxy,
          RunningEngine(model, tmp_path, tiers=[tier(f"redis://127.0.0.1:{proxy.port}")]) as engine):  # fmt: skip
        for number in (0, 1):
            engine.generate(prompt(number)).same_as(expected[number])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
        engine.forget()
        proxy.late(1.0)                                # so long the answer is on its way that lets the load begin
        killer = threading.Thread(target=kill_in_a_load, args=(redis, asked(redis)))
        killer.start()
        halved = engine.generate(prompt(1))
        killer.join()
        proxy.late(0.0)
        halved.same_as(expected[1])
        assert halved.cached == 0
        assert engine.chunks("loaded_chunks") == {"hit": 16, "failed": 16}
        engine.forget()
        for number in (0, 2):
            gives(engine, number, expected[number], cached=0)
        redis.start()
        until_it_hits(engine, 3, expected[3])


def kill_in_a_load(redis: RedisServer, before: int) -> None:
    """Stop it when it has answered what there is, and kill it when it has been asked for that."""
    until(lambda: asked(redis) != before)
    redis.hang()
    time.sleep(3.0)
    redis.kill()


def asked(redis: RedisServer) -> int:
    """How often it was asked whether a page is there."""
    found = re.search(r"cmdstat_exists:calls=(\d+)", redis.say("INFO", "commandstats"))
    return 0 if found is None else int(found[1])


def test_a_store_that_hangs_costs_a_request_its_deadline(models: Models, tmp_path: Path, redis: RedisServer) -> None:
    """Redis is stopped, and its connections stay. A prompt takes the lookup's deadline longer than one that nobody
    stored, and from then on the store is not asked for a while. When it goes on, its pages are served again."""
    expected, deadline = models.answers("llama"), 1.0
    tiers = [tier(redis.url, lookup_timeout=deadline)]
    with RunningEngine(models.folder("llama"), tmp_path, tiers=tiers) as engine:
        engine.generate(prompt(0)).same_as(expected[0])
        engine.generate(prompt(1)).same_as(expected[1])
        alone = max(engine.generate(prompt(number)).seconds for number in range(100, 105))
        engine.forget()
        assert engine.generate(prompt(1)).cached == WHOLE
        engine.forget()
        redis.hang()
        hung = gives(engine, 0, expected[0], cached=0)
        assert hung.seconds < deadline + 2 * alone + 0.5
        for number in (1, 2, 3):
            answer = engine.generate(prompt(number))
            answer.same_as(expected[number])
            assert answer.seconds < deadline + 2 * alone + 0.5
        redis.resume()
        until_it_hits(engine, 1, expected[1])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 3.5 MiB, where mounting is permitted; for 6, when the file ``other`` is removed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        (folder / "other").write_bytes(bytes(5 << 19))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stores_no_more_and_serves_what_it_has(models: Models, tmp_path: Path, small_disk: Path) -> None:
    """The store's capacity is more than the disk has. Four prompts take 4 MiB."""
    expected = models.answers("llama")
    tiers = [tier(f"file:{small_disk}/kv?capacity=64MiB&segment=1MiB")]
    with RunningEngine(models.folder("llama"), tmp_path, tiers=tiers) as engine:
        for number in range(4):
            gives(engine, number, expected[number], cached=0)
            engine.quiet()
        engine.forget()
        assert engine.chunks("stored_chunks").get("failed", 0) > 0
        gives(engine, 0, expected[0], cached=WHOLE)
        lost = engine.generate(prompt(3))
        lost.same_as(expected[3])
        assert lost.cached < WHOLE
        (small_disk / "other").unlink()
        until_it_hits(engine, 3, expected[3])


# A store survives an upgrade: what one version of vLLM stored, another one serves, with the same answers.


LAST = os.environ.get("ASYNCCACHE_VLLM_LAST", "")


def test_an_engine_that_calls_itself_another_version_is_served_what_this_one_stored(
    models: Models, tmp_path: Path
) -> None:
    """And one whose blocks have another length is not."""
    expected, model, tiers = models.answers("llama"), models.folder("llama"), [tier(f"file:{tmp_path}/kv")]
    with RunningEngine(model, tmp_path, tiers=tiers) as engine:
        assert engine.generate(prompt(0)).cached == 0
        engine.quiet()
    with RunningEngine(model, tmp_path, tiers=tiers, environment={"CALLS_ITSELF": "0.99.0"}) as engine:
        gives(engine, 0, expected[0], cached=WHOLE)
    with RunningEngine(model, tmp_path, tiers=tiers, block_size=2 * BLOCK) as engine:
        assert engine.generate(prompt(0)).cached == 0


@pytest.mark.skipif(not LAST, reason="for make test-vllm-upgrade: needs another version of vLLM")
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_this_version_is_served_what_the_last_one_stored(kind: Kind, models: Models, tmp_path: Path) -> None:
    """``ASYNCCACHE_VLLM_LAST``: the folders in which the last version and its transformers are found."""
    given = f"{str(models.folder(kind))!r}, {str(tmp_path)!r}"
    code = f"from tests.vllm.test_engine_stores import stored_by_the_last as stored; stored({given})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": LAST}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[Answer] = pickle.loads((tmp_path / "answers").read_bytes())
    with RunningEngine(models.folder(kind), tmp_path, tiers=[tier(f"file:{tmp_path}/kv")]) as engine:
        for number, answer in enumerate(answers):
            served = engine.generate(prompt(number))
            assert (answer.cached, served.cached) == (0, WHOLE)
            served.same_as(answer)


def stored_by_the_last(model: str, folder: str) -> None:
    """What the last version does: answer two prompts, and leave them in the store."""
    with RunningEngine(Path(model), Path(folder), tiers=[tier(f"file:{folder}/kv")]) as engine:
        answers = [engine.generate(prompt(number)) for number in range(2)]
        engine.quiet()
    Path(folder, "answers").write_bytes(pickle.dumps(answers))
