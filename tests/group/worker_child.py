"""A rank's process: ``worker_child.py ADDRESS RANK TP PP LIVES``, of one group after another as ``head_child``. Says
what it has verified in each and how the last one ended, in JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from asynccache import CopyFailed, RankFailure
from asynccache.worker import Topology, connect
from tests.group.group_kit import stage_of
from tests.simulated.world import EngineBytes, task_of


async def main(address: str, rank: int, topology: Topology, lives: int) -> None:
    verified: list[int] = []
    ended = "well"
    try:
        for life in range(max(lives, 1)):
            await live(f"{address}-{life}", rank, topology, verified)
    except RankFailure as failure:
        ended = str(failure)
    print(json.dumps({"verified": verified, "ended": ended}), flush=True)


async def live(address: str, rank: int, topology: Topology, verified: list[int]) -> None:
    async with connect(address, rank, shard=stage_of(topology, rank)) as worker:
        assert worker.topology == topology
        books = EngineBytes(worker.pools, worker.config, topology.place(rank))
        print("open", flush=True)
        async for batch in worker:
            task = task_of(batch.payload)
            try:
                await worker.layer(batch, worker.layers - 1)
            except CopyFailed:
                batch.end()
                continue
            books.verify(task)
            books.write(task)
            batch.end()
        verified.append(books.verified)


if __name__ == "__main__":
    shape = Topology(tp=int(sys.argv[3]), pp=int(sys.argv[4]))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), shape, int(sys.argv[5])))
