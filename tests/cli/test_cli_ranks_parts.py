"""The parts of a run over ranks, without processes: shares, turns, digests, sums."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from asynccache import AsyncCache, Replicated
from asynccache.cli.engine import Engine, Piece
from asynccache.cli.leaks import Left
from asynccache.cli.meter import Meter, Samples, Spread
from asynccache.cli.options import settle
from asynccache.cli.ranked import merge
from asynccache.cli.ranked.child import Channel
from asynccache.cli.ranked.digest import tree_digest
from asynccache.cli.ranked.lives import Aborted, Life, turn
from asynccache.cli.ranked.messages import Answer, Ended, Failure, Tick, arrival, receive, send
from asynccache.cli.ranked.scheduler import Scheduler
from asynccache.cli.ranked.shard import shard_config, store_url
from asynccache.cli.request import Request
from asynccache.cli.sizing import configure
from asynccache.cli.tally import Tally
from asynccache.cli.trace import TraceRequest, output_of, prompt_of
from asynccache.config import CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.core.settings import ComponentKind
from asynccache.errors import ConfigError
from asynccache.memory.cpu import CpuDevice
from asynccache.ranks import Topology
from asynccache.testing.simulated_device import SimulatedDevice
from asynccache.testing.simulated_loop import SimulatedLoop, simulate
from asynccache.testing.simulated_ranks import SimulatedRanks

# shares


def model(**settings: object) -> CacheConfig:
    return configure(settle("stress", settings, {}))


def test_the_parts_of_all_ranks_are_the_whole() -> None:
    config, topology = model(), Topology(tp=2, cp=2, pp=2)
    parts = [shard_config(config, topology, rank) for rank in range(8)]
    for i, whole in enumerate(config.components):
        mine = [part.components[i] for part in parts]
        sizes = [p.state_bytes if isinstance(p, Mamba) else p.bytes_per_token for p in mine]
        assert sum(sizes) == (whole.state_bytes if isinstance(whole, Mamba) else whole.bytes_per_token)
        assert [p.covers for p in mine] == [(0, 1)] * 4 + [(2, 3)] * 4
    assert {part.core() for part in parts} == {config.core()}


def test_stages_that_cannot_be_equal_differ_by_a_layer() -> None:
    config = model(layers="5", bytes_per_token="40", mamba_bytes="640")
    parts = [shard_config(config, Topology(pp=2), rank).components[0] for rank in range(2)]
    assert [part.covers for part in parts] == [(0, 1), (2, 3, 4)]
    assert [part.bytes_per_token for part in parts if isinstance(part, Full)] == [16, 24]


def test_what_is_replicated_is_whole_on_every_rank_of_a_stage_and_slots_are_everywhere() -> None:
    config = CacheConfig(
        model="m", components=(Full(bytes_per_token=0, device_tokens=64, host_tokens=64),),
        sidecars=(Sidecar(name="a", indices_from="full", bytes_per_page=64, layers=2, replicated=Replicated.TP_CP),
                  Sidecar(name="b", indices_from="full", bytes_per_page=64, layers=2)),
    )  # fmt: skip
    part = shard_config(config, Topology(tp=2, pp=2), 3)
    assert [(s.bytes_per_page, s.covers) for s in part.sidecars] == [(32, (1,)), (16, (1,))]
    assert part.components[0].layers == 1


@pytest.mark.parametrize(("topology", "sentence"), [
    (Topology(tp=3), "--bytes-per-token=512 must be a multiple of 12: 4 layers over tp 3 and cp 1"),
    (Topology(pp=5), "--pp=5: a stage would have no layer, there are --layers=4"),
])  # fmt: skip
def test_what_cannot_be_shared_out_is_refused(topology: Topology, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        shard_config(model(), topology, 0)
    assert str(error.value) == sentence


@pytest.mark.parametrize(("url", "mine"), [
    ("file:/var/kv?capacity=1GiB", "file:/var/kv/rank-3?capacity=1GiB"), ("file:/var/kv/", "file:/var/kv/rank-3"),
    ("file:/disk-{rank}/kv", "file:/disk-3/kv"), ("redis://host/0", "redis://host/0"), ("memory:", "memory:"),
])  # fmt: skip
def test_a_folder_has_one_owner_and_everything_else_is_shared(url: str, mine: str) -> None:
    assert store_url(url, 3) == mine
    assert shard_config(replace(model(), storage=(url, "memory:")), Topology(tp=4), 3).stores == (mine, "memory:")


def test_bytes_of_another_rank_are_wrong() -> None:
    """Of another tp rank, of another cp rank, of another stage: with the same tokens in the same slots."""
    values = np.arange(4, dtype=np.uint64)
    piece = [Piece(ComponentKind.FULL, np.arange(4, dtype=np.int32), values, 0)]
    topology = Topology(tp=2, cp=2, pp=2)
    layers = [torch.zeros(4, 64, dtype=torch.uint8) for _ in range(2)]

    class Layers:
        def layer(self, i: int) -> torch.Tensor:
            return layers[i]

    def engine(rank: int) -> Engine:
        place = topology.place(rank)
        config = shard_config(model(components="full", bytes_per_token="64"), topology, rank)
        specs = [s.on_rank(place.tp, 2, (place.cp, 2), (place.pp, 2)) for s in config.pools()]
        return Engine(specs, {"full": Layers()}, lambda: None, threads=1)  # type: ignore[arg-type,return-value]

    engine(0).write(piece)
    assert [engine(rank).verify(piece).wrong for rank in range(8)] == [0] + [4] * 7


# turns


@pytest.mark.asyncio
async def test_a_life_goes_from_turn_to_turn_in_the_task_that_resumes_it() -> None:
    said = []

    async def live() -> None:
        for i in range(2):
            said.append((i, asyncio.current_task()))
            await asyncio.sleep(0)
            await turn()

    life = Life(live())
    me = asyncio.current_task()
    assert [await life.resume() for _ in range(3)] == [False, False, True]
    assert said == [(0, me), (1, me)]


@pytest.mark.asyncio
async def test_an_aborted_life_hears_of_it_at_its_next_turn() -> None:
    said = []

    async def live() -> None:
        try:
            await turn()
        except Aborted:
            said.append("aborted")
            await asyncio.sleep(0)

    life = Life(live())
    assert not await life.resume()
    life.abort()
    assert said == []
    assert await life.resume()
    assert said == ["aborted"]


@pytest.mark.asyncio
async def test_what_a_life_raises_or_is_thrown_passes_through() -> None:
    async def wrong() -> None:
        await turn()
        raise ValueError("wrong")

    life = Life(wrong())
    await life.resume()
    with pytest.raises(ValueError, match="wrong"):
        await life.resume()

    async def slow() -> None:
        await asyncio.Event().wait()

    task = asyncio.create_task(Life(slow()).resume())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_closing_lets_a_life_give_back_what_it_holds() -> None:
    said = []

    async def live() -> None:
        try:
            await turn()
        finally:
            said.append("given back")

    life = Life(live())
    await life.resume()
    life.close()
    assert said == ["given back"]


@pytest.mark.parametrize("aborted", [1, 2, 3])
def test_an_abort_may_come_with_the_request_itself(aborted: int) -> None:
    """And at any tick after it: on all ranks the request ends in that tick, and holds nothing."""
    prompt, answer = np.arange(64, dtype=np.int32), np.arange(1, dtype=np.int32)
    asked = arrival(Request(5, 64, 1, lambda: prompt, lambda: answer), None)

    async def rank(cache: AsyncCache) -> list[Answer]:
        tally = Tally()
        scheduler = Scheduler(cache, None, settle("stress", {}, {}), tally, Meter())  # type: ignore[arg-type]
        server = scheduler._server

        async def computes_for_ever(request: Request, text: Any, handle: Any) -> None:
            async with server._lease(request, text, 0, handle):
                while True:
                    await turn()

        server._leased = computes_for_ever  # type: ignore[method-assign]
        ticks = [Tick(i, (asked,) * (i == 1), (5,) * (i == aborted)) for i in range(1, 5)]
        said = [await scheduler.iterate(tick) for tick in ticks]
        assert (tally.requests, tally.cancelled, tally.problems) == (1, 1, [])
        assert [answer.ended for answer in said] == [(5,) * (i == aborted) for i in range(1, 5)]
        assert not cache.core.active_leases()
        return said

    async def world(loop: SimulatedLoop) -> None:
        net = SimulatedRanks(Topology(tp=2), Random("net"))

        async def lived(number: int) -> list[Answer]:
            device = SimulatedDevice(seed=number)
            async with AsyncCache(model(), device=device, ranks=net.member(number)) as cache:
                said = await rank(cache)
            await device.aclose()
            return said

        first, second = await asyncio.gather(*map(lived, range(2)))
        assert [answer._replace(pulse=None) for answer in first] == [a._replace(pulse=None) for a in second]

    simulate(world, 3)


# messages


@pytest.mark.asyncio
async def test_requests_arrive_as_they_were_sent() -> None:
    line = TraceRequest(0.0, 700, 9, (3, 4))
    known = Request(5, 700, 9, prompt_of(line), output_of(5, 9), 1.5, True, "tenant", 1)
    reader = asyncio.StreamReader()

    class Writer:
        def write(self, content: bytes) -> None:
            reader.feed_data(content)

    for one in (arrival(known, line), arrival(known, None)):
        send(Writer(), one)  # type: ignore[arg-type]
        whole = (await receive(reader)).whole()
        assert whole[:3] + whole[5:] == known[:3] + known[5:]
        assert np.array_equal(whole.prompt(), known.prompt())
        assert np.array_equal(whole.output(), known.output())
    reader.feed_eof()
    with pytest.raises(EOFError):
        await receive(reader)


@pytest.mark.asyncio
@pytest.mark.parametrize("content", [b"garbage", b"", b"\x80\x04", b"cno_such_module\nThing\n."])
async def test_what_cannot_be_read_is_no_end_of_the_stream(content: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(len(content).to_bytes(4, "little") + content)
    with pytest.raises(ValueError, match=f"a message of {len(content)} bytes that cannot be read: "):
        await receive(reader)


@pytest.mark.slow
def test_a_rank_that_cannot_read_what_it_is_told_ends_and_says_so() -> None:
    command, rank = socket.socketpair()
    with command, rank:
        process = subprocess.Popen(
            [sys.executable, "-m", "asynccache.cli.ranked.child", "0", str(rank.fileno())], stderr=subprocess.PIPE,
            pass_fds=(rank.fileno(),), text=True,
        )  # fmt: skip
        command.sendall(b"\7\0\0\0garbage")
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode > 0
    assert said.splitlines()[-1].startswith("the command sent a message of 7 bytes that cannot be read: ")


# sums


def said(rank: int, **counts: int) -> Ended:
    tally = Tally(**{"requests": 9, "served": 9, "verified": 10, "waits": Samples([0.1, 0.2 + rank])} | counts)  # type: ignore[arg-type]
    stage = {"ops": 3 + rank, "bytes": 100, "errors": rank, "tokens": 48, "latency_ms": {"p50": 1.0 + rank}}
    facts = {"stages": {"backup_host": stage}, "storage": {"pages": 2, "state": "up"}, "stores": {"file": {"pages": 2}},
             "evicted": {}, "lost_pages": 0, "failed_loads": 0, "splits": 1, "nodes": 2, "tiers": {}}  # fmt: skip
    return Ended(tally, facts, Left(0, 0, 0), rank, Spread(1, 2, 3, 4 + rank), Spread(0, 0, 0, 0), 1.5, 100, 7, 1, 2)


def test_what_the_group_does_counts_once_and_what_ranks_do_is_added_up() -> None:
    both = {0: said(0), 1: said(1)}
    total = Tally()
    merge.tallies([one.tally for one in both.values()], total)
    assert (total.requests, total.served, total.verified) == (9, 9, 20)
    assert list(total.waits) == [0.1, 1.2]
    facts = merge.all_facts([one.facts for one in both.values()])
    assert facts["stages"]["backup_host"] == {
        "ops": 4, "bytes": 200, "errors": 1, "tokens": 48, "latency_ms": {"p50": 2.0}
    }  # fmt: skip
    assert facts["storage"] == {"pages": 4, "state": "up"}
    assert merge.all_leaks(both.values()) == (0, 0, 0, 1)
    assert merge.worst([one.lag for one in both.values()])["max"] == 5
    assert merge.disagreement(both) is None


def test_ranks_that_count_differently_are_named() -> None:
    assert merge.disagreement({0: said(0), 1: said(1, served=8)}) == (
        "served differs between ranks: 9 on rank 0; 8 on rank 1"
    )


def test_what_all_ranks_complain_of_is_said_once() -> None:
    ended = {rank: said(rank) for rank in range(2)}
    for one in ended.values():
        one.tally.problem("it rains")
    ended[1].tally.problem("it snows")
    ended[0] = ended[0]._replace(failure=Failure("RankFailure", "rank 2 is gone", 0.0))
    total = Tally()
    merge.problems(ended, total)
    assert total.problems == ["rank 0: RankFailure: rank 2 is gone", "every rank: it rains", "rank 1: it snows"]


# digests


@pytest.mark.asyncio
async def test_a_tree_digest_tells_trees_apart() -> None:
    config = CacheConfig(model="m", page_size=4, components=(
        Full(bytes_per_token=8, device_tokens=64, host_tokens=64),
        SlidingWindow(window=8, bytes_per_token=8, device_tokens=64, host_tokens=64),
    ))  # fmt: skip

    async def digest(*texts: range, tamper: bool = False) -> int:
        device = CpuDevice()
        async with AsyncCache(config, device=device) as cache:
            for text in texts:
                async with cache.lease(list(text)) as lease:
                    await lease.commit(list(text))
            await cache.flush()
            if tamper:
                next(iter(cache.core.world.roots.values())).pins[0] += 1
            found = tree_digest(cache.core)
            if tamper:
                next(iter(cache.core.world.roots.values())).pins[0] -= 1
        await device.aclose()
        return found

    one = await digest(range(16), range(100, 120))
    assert one == await digest(range(16), range(100, 120))
    assert len({one, await digest(range(100, 120), range(16)), await digest(range(16)),
                await digest(range(16), range(100, 120), tamper=True)}) == 4  # fmt: skip


@pytest.mark.asyncio
async def test_the_last_word_of_a_rank_is_heard_while_orders_are_on_their_way_to_it() -> None:
    """A socket that closes with something unread breaks the other end, which then loses what it has not read."""
    command, rank = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=command)
    channel = Channel(*await asyncio.open_connection(sock=rank))

    async def end() -> None:
        channel.send("the last word")
        await channel.heard()
        await channel.aclose()

    ending = asyncio.create_task(end())
    for tick in range(200):
        send(writer, tick)
        await asyncio.sleep(0)
    assert await receive(reader) == "the last word"
    assert not ending.done()
    writer.close()
    await ending
    await writer.wait_closed()
