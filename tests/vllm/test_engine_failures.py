"""vLLM's real engine over a store that fails: no request gets other tokens, or waits for longer than it should."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.redis_server import RedisServer
from tests.stores.slow_proxy import SlowProxy
from tests.vllm.engine_kit import BLOCK, Answer, Models, RunningEngine, installed, prompt, tier

pytestmark = [
    pytest.mark.skipif(not installed(), reason="vLLM is not installed: make test-vllm"),
    pytest.mark.slow(60),
]

WHOLE = 16 * BLOCK
RECOVERS_WITHIN = 60.0


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def until_it_hits(engine: RunningEngine, number: int) -> Answer:
    """The first answer to a prompt that comes from the store. The store may need a while to be trusted again."""
    until = time.monotonic() + RECOVERS_WITHIN
    while True:
        engine.generate(prompt(number))                # stored, if it was not
        engine.forget()
        answer = engine.generate(prompt(number))
        if answer.cached == WHOLE:
            return answer
        assert time.monotonic() < until, f"no hit any more: {engine.log[-2000:]}"
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
        again = engine.generate(prompt(0))
        again.same_as(expected[0])
        assert again.cached == 0
        assert engine.chunks("loaded_chunks").get("corrupt", 0) > 0
        assert "corrupt" in engine.log
        engine.forget()
        stored = engine.generate(prompt(0))
        assert stored.cached == WHOLE
        stored.same_as(expected[0])


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
            dead = engine.generate(prompt(number))
            dead.same_as(expected[number])
            assert dead.cached == 0
        redis.start()
        until_it_hits(engine, 3).same_as(expected[3])


def kill_in_a_load(redis: RedisServer, before: int) -> None:
    """Stop it when it has answered what there is, and kill it when it has been asked for that."""
    until = time.monotonic() + 60
    while asked(redis) == before:
        assert time.monotonic() < until, "nobody asks"
        time.sleep(0.005)
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
        hung = engine.generate(prompt(0))
        hung.same_as(expected[0])
        assert hung.cached == 0
        assert hung.seconds < deadline + 2 * alone + 0.5
        for number in (1, 2, 3):
            answer = engine.generate(prompt(number))
            answer.same_as(expected[number])
            assert answer.seconds < deadline + 2 * alone + 0.5
        redis.resume()
        until_it_hits(engine, 1).same_as(expected[1])


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
            answer = engine.generate(prompt(number))
            answer.same_as(expected[number])
            assert answer.cached == 0
            engine.quiet()
        engine.forget()
        assert engine.chunks("stored_chunks").get("failed", 0) > 0
        kept = engine.generate(prompt(0))
        kept.same_as(expected[0])
        assert kept.cached == WHOLE
        lost = engine.generate(prompt(3))
        lost.same_as(expected[3])
        assert lost.cached < WHOLE
        (small_disk / "other").unlink()
        until_it_hits(engine, 3).same_as(expected[3])
