"""A rank's process: ``worker_child.py ADDRESS RANK TP PP``. Says what it has verified and how it ended, in JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from asynccache import CopyFailed, RankFailure
from asynccache.worker import Topology, connect
from tests.group.engine_bytes import EngineBytes, task_of
from tests.group.group_kit import stage_of


async def main(address: str, rank: int, topology: Topology) -> None:
    verified, ended = 0, "well"
    try:
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
                verified = books.verified
                batch.end()
    except RankFailure as failure:
        ended = str(failure)
    print(json.dumps({"verified": verified, "ended": ended}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Topology(tp=int(sys.argv[3]), pp=int(sys.argv[4]))))
