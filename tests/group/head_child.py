"""A head's process without a worker of its own: ``head_child.py FOLDER ADDRESS TP PP LIVES``. It serves prompts through
one group of workers after another (no LIVES: through one, without end), each at an address of its own, and says what it
found, in JSON; torch is not loaded."""

from __future__ import annotations

import asyncio
import json
import sys

from asynccache import AsyncCache, CacheConfig, Full, PrefetchPolicy, RankFailure
from asynccache.worker import Topology, listen

PAGE = 16


def settings(folder: str) -> CacheConfig:
    return CacheConfig(
        model="test", page_size=PAGE, prefetch_threshold=PAGE, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE,
        components=(Full(bytes_per_token=64, device_tokens=24 * PAGE, host_tokens=64 * PAGE, layers=2),),
        storage=f"file:{folder}/rank-{{rank}}?capacity=64MiB",
    )  # fmt: skip


async def main(folder: str, address: str, topology: Topology, lives: int) -> None:
    hits: list[int] = []
    failure = None
    try:
        for life in range(max(lives, 1)):
            await live(settings(folder), f"{address}-{life}", topology, hits, endless=lives == 0)
    except RankFailure as error:
        failure = {"rank": error.rank, "reason": error.reason}
    print(json.dumps({"hits": hits[:8], "failure": failure, "torch": "torch" in sys.modules}), flush=True)


async def live(config: CacheConfig, address: str, topology: Topology, hits: list[int], *, endless: bool) -> None:
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


if __name__ == "__main__":
    shape = Topology(tp=int(sys.argv[3]), pp=int(sys.argv[4]))
    asyncio.run(main(sys.argv[1], sys.argv[2], shape, int(sys.argv[5])))
