"""vLLM's real engine while the store under it fails: no request gets other tokens, or waits for longer than it should."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.redis_server import RedisServer
from tests.stores.server import CannotStart, required
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
    server = RedisServer()
    try:
        server.start()
    except CannotStart as error:
        server.close()
        if required():
            pytest.fail(str(error))
        pytest.skip(str(error))
    try:
        yield server
    finally:
        server.close()


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
    """While pages come slowly, it is gone. They are computed; when it is there again, empty, it is used again."""
    expected = models.answers("llama")
    with (SlowProxy(redis.port) as proxy,
          RunningEngine(models.folder("llama"), tmp_path, tiers=[tier(f"redis://127.0.0.1:{proxy.port}")]) as engine):  # fmt: skip
        for number in (0, 1):
            engine.generate(prompt(number)).same_as(expected[number])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
        engine.forget()
        proxy.late(0.1)                                # 16 pages of 64 KiB: 1.6 s
        kill = threading.Timer(0.8, redis.kill)
        kill.start()
        halved = engine.generate(prompt(1))
        kill.join()
        proxy.late(0.0)
        halved.same_as(expected[1])
        assert halved.cached < WHOLE
        assert engine.chunks("loaded_chunks").get("failed", 0) > 0, "it was killed before or after the load"
        dead = engine.generate(prompt(0))
        assert dead.cached == 0
        dead.same_as(expected[0])
        engine.generate(prompt(2)).same_as(expected[2])
        redis.start()
        until_it_hits(engine, 3).same_as(expected[3])


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
    """A file system of 6 MiB, where mounting is permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_stores_no_more_and_serves_what_it_has(models: Models, tmp_path: Path, small_disk: Path) -> None:
    """The store may have more than there is room for. Somebody else's file takes what is left of the disk."""
    expected = models.answers("llama")
    tiers = [tier(f"file:{small_disk}/kv?capacity=64MiB&segment=1MiB")]
    with RunningEngine(models.folder("llama"), tmp_path, tiers=tiers) as engine:
        engine.generate(prompt(0)).same_as(expected[0])
        engine.forget()
        assert engine.generate(prompt(0)).cached == WHOLE
        with open(small_disk / "rest", "wb") as rest:
            try:
                while True:
                    rest.write(bytes(4096))
                    rest.flush()
            except OSError:
                pass
        for number in (1, 2, 3):
            answer = engine.generate(prompt(number))
            assert answer.cached == 0
            answer.same_as(expected[number])
        engine.forget()
        assert engine.chunks("stored_chunks").get("failed", 0) > 0
        kept = engine.generate(prompt(0))
        assert kept.cached == WHOLE
        kept.same_as(expected[0])
        lost = engine.generate(prompt(3))
        assert lost.cached < WHOLE
        lost.same_as(expected[3])
        (small_disk / "rest").unlink()
        engine.forget()
        until_it_hits(engine, 2).same_as(expected[2])
