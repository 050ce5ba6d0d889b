"""A process of a group, of one group after another in the same process, each at an address of its own.

``rank_child.py head FOLDER ADDRESS TP PP LIVES``: a head without a worker of its own. It serves prompts (no LIVES:
through one group, without end) and says what it found, in JSON; torch is not loaded.
``rank_child.py RANK FOLDER ADDRESS TP PP LIVES``: a rank's process. It says what it has verified in each group and how
the last one ended."""

from __future__ import annotations

import asyncio
import json
import sys

from asynccache import AsyncCache, CacheConfig, CopyFailed, Full, PrefetchPolicy, RankFailure
from asynccache.worker import Topology, connect, listen

PAGE = 16


async def head(config: CacheConfig, address: str, topology: Topology, hits: list[int], *, endless: bool) -> None:
    async with listen(address, topology, own=None, timeout=2.0, arrival=60.0) as workers:
        async with AsyncCache(config, workers=workers) as cache:
            assert not cache.pools
            print("open", flush=True)
            while True:
                for seed in range(4):
                    tokens = [seed * 1000 + i for i in range(6 * PAGE + 1)]
                    async with cache.lease(tokens) as lease:
                        task = [None, tokens, {"full": lease.pages.tolist()}, lease.cached, -1, -1]
                        number = cache.send_batch(json.dumps(task).encode(), [lease])
                        await lease.loaded()
                        hits.append(lease.cached // PAGE)
                        await lease.commit(tokens, after=number)
                        lease.release(after=number)
                if not endless:
                    break
                await asyncio.sleep(0.01)
            await cache.flush()


async def worker(rank: int, address: str, topology: Topology, verified: list[int]) -> None:
    from tests.group.group_kit import stage_of
    from tests.simulated.world import EngineBytes, task_of

    async with connect(address, rank, shard=stage_of(topology, rank)) as face:
        assert face.topology == topology
        books = EngineBytes(face.pools, face.config, topology.place(rank))
        print("open", flush=True)
        async for batch in face:
            task = task_of(batch.payload)
            try:
                await face.layer(batch, face.layers - 1)
            except CopyFailed:
                batch.end()
                continue
            books.verify(task)
            books.write(task)
            batch.end()
        verified.append(books.verified)


async def main(who: str, folder: str, address: str, topology: Topology, lives: int) -> None:
    found: list[int] = []
    failure = None
    config = CacheConfig(
        model="test", page_size=PAGE, prefetch_threshold=PAGE, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        components=(Full(bytes_per_token=64, device_tokens=24 * PAGE, host_tokens=64 * PAGE, layers=2),),
        storage=f"file:{folder}/rank-{{rank}}?capacity=64MiB",
    )  # fmt: skip
    try:
        for life in range(max(lives, 1)):
            if who == "head":
                await head(config, f"{address}-{life}", topology, found, endless=lives == 0)
            else:
                await worker(int(who), f"{address}-{life}", topology, found)
    except RankFailure as error:
        failure = {"rank": error.rank, "reason": error.reason, "said": str(error)}
    print(json.dumps({"found": found[:8], "failure": failure, "torch": "torch" in sys.modules}), flush=True)


if __name__ == "__main__":
    who, folder, address, tp, pp, lives = sys.argv[1:]
    asyncio.run(main(who, folder, address, Topology(tp=int(tp), pp=int(pp)), int(lives)))
