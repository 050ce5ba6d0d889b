"""Compares SGLang's file backend with ours: the CPU time to store a page and to read it, in turns, in one run.

    build/sglang/bin/python benchmarks/sglang_backend.py [--folder FOLDER] [--page-bytes 64KiB] [--pages 1024]
        [--batches 16,128] [--rounds 5] [--json FILE]

It needs SGLang (``make test-sglang`` makes that environment) and no GPU. Both backends move the same pages of one of
SGLang's own host pools, ``MHATokenToKVPoolHost`` (K and V in two parts) or ``MLATokenToKVPoolHost`` (one part), to
folders on the same disk and back. Ours is a ``file:`` store with checksums. Counted is the CPU time of all threads of
the process, user and system. Every page that was read is compared with what was written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.sglang import standins

standins.install()

import torch
from asynccache_sglang.storage import AsyncCacheStorage
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from asynccache.storage import parse_size

PAGE = 16
LAYERS = 4
WARM = 256
GOALS = {"out": 0.2, "in": 0.25}


class Cost(NamedTuple):
    """µs of CPU time for each page: to store it (``out``) and to read it (``into``)."""

    out: float
    into: float


class Peer:
    """SGLang's file backend, called as SGLang's controller calls it for the pools of hybrid models."""

    def __init__(self, config: HiCacheStorageConfig, pool: Any, folder: str) -> None:
        self.storage = HiCacheFile(config, file_path=f"{folder}/peer")
        self.storage.register_mem_host_pool_v2(pool, PoolName.KV)

    def out(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.storage.batch_set_v2([PoolTransfer(PoolName.KV, indices, keys=keys)])[PoolName.KV])

    def into(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.storage.batch_get_v2([PoolTransfer(PoolName.KV, indices, keys=keys)])[PoolName.KV])

    def close(self) -> None: ...


class Ours:
    """Our backend, called by the interface that SGLang uses with ``"interface_v1": 1``."""

    def __init__(self, config: HiCacheStorageConfig, pool: Any, folder: str) -> None:
        config.extra_config = {"storage": f"file:{folder}/ours?capacity=8GiB", "namespace": "bench", "interface_v1": 1}
        self.storage = AsyncCacheStorage(config, {})
        self.storage.register_mem_pool_host(pool)
        self.storage.on_host_pools_registered()

    def out(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.storage.batch_set_v1(keys, indices))

    def into(self, keys: list[str], indices: torch.Tensor) -> bool:
        return all(self.storage.batch_get_v1(keys, indices))

    def close(self) -> None:
        self.storage.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where both keep their files (default: a temporary folder)")
    parser.add_argument("--page-bytes", default="64KiB", help="size of a page (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=1024, help="pages in a round (default: %(default)s)")
    parser.add_argument("--batches", default="16,128",
                        help="pages in a call; SGLang's controller uses 128 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    given = parser.parse_args()
    page_bytes = parse_size("--page-bytes", given.page_bytes)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for kind in ("mha", "mla"):
            for batch in map(int, given.batches.split(",")):
                rows.append(compared(kind, page_bytes, given.pages, batch, given.rounds, folder))
                show(rows[-1])
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


def compared(kind: str, page_bytes: int, pages: int, batch: int, rounds: int, folder: str) -> dict[str, Any]:
    """Measure both in turns; returns the medians over the rounds, and the median of the ratios of each round."""
    costs: dict[str, list[Cost]] = {"sglang": [], "asynccache": []}
    for _ in range(rounds):
        pool = host_pool(kind, page_bytes, pages)
        for name, make in (("sglang", Peer), ("asynccache", Ours)):
            config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, kind == "mla", False, True, "bench")
            with tempfile.TemporaryDirectory(dir=folder) as own:
                backend = make(config, pool, own)
                costs[name].append(cost(backend, pool, pages, batch))
                backend.close()
    made: dict[str, Any] = {"pool": kind, "page_bytes": page_bytes, "pages": pages, "batch": batch, "rounds": rounds}
    for way, field in (("out", "out"), ("in", "into")):
        for name, found in costs.items():
            made[f"{name}_{way}_us"] = round(statistics.median(getattr(one, field) for one in found), 1)
        pairs = zip(costs["asynccache"], costs["sglang"], strict=True)
        made[f"{way}_ratio"] = round(statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs), 3)
    return made


def cost(backend: Any, pool: Any, pages: int, batch: int) -> Cost:
    """Store all pages, overwrite the pool, read the pages back and compare every one. What is made only once (a thread,
    a file, memory that is touched for the first time) is made before, by pages that are not counted."""
    content = pool.kv_buffer.view(torch.uint8)
    keys = [f"{page:064x}" for page in range(pages)]
    for at in range(0, min(pages, WARM), batch):
        warm = [f"warm {key}" for key in keys[at : at + batch]]
        assert backend.out(warm, indices(at, batch, pages))
        assert backend.into(warm, indices(at, batch, pages))
    expected = content.clone()
    out = cpu(lambda at: backend.out(keys[at : at + batch], indices(at, batch, pages)), pages, batch)
    content.fill_(0xAB)
    into = cpu(lambda at: backend.into(keys[at : at + batch], indices(at, batch, pages)), pages, batch)
    assert torch.equal(content, expected), "wrong bytes came back"
    return Cost(out, into)


def cpu(act: Callable[[int], bool], pages: int, batch: int) -> float:
    began = time.process_time()
    for at in range(0, pages, batch):
        assert act(at), "a page was not moved"
    return (time.process_time() - began) / pages * 1e6


def indices(at: int, batch: int, pages: int) -> torch.Tensor:
    return torch.arange(at * PAGE, min(at + batch, pages) * PAGE)


def host_pool(kind: str, page_bytes: int, pages: int) -> Any:
    """One of SGLang's host pools in the layout page_first, with random bytes and without a device pool."""
    width = page_bytes // (PAGE * LAYERS * 2)  # elements of two bytes in a row
    made: Any
    if kind == "mha":
        made = object.__new__(MHATokenToKVPoolHost)
        made.head_num, made.head_dim, made.v_head_dim = 1, width // 2, width // 2
    else:
        made = object.__new__(MLATokenToKVPoolHost)
        made.kv_cache_dim = width
    made.dtype, made.layer_num, made.page_size, made.layout = torch.bfloat16, LAYERS, PAGE, "page_first"
    made.device, made.pin_memory, made.dcp_size = "cpu", False, 1
    made.page_num, made.size, made.size_per_token = pages, pages * PAGE, page_bytes // PAGE
    shape = (2, made.size, LAYERS, 1, width // 2) if kind == "mha" else (made.size, LAYERS, 1, width)
    made.kv_buffer = torch.randint(0, 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    return made


def show(row: dict[str, Any]) -> None:
    print(f"{row['pool']}, {row['page_bytes']} bytes a page, {row['batch']} pages a call, {row['rounds']} rounds")
    for way in ("out", "in"):
        goal = "reached" if row[f"{way}_ratio"] <= GOALS[way] else "missed"
        print(f"  {way:>3}: SGLang's file {row[f'sglang_{way}_us']:6.1f} µs of CPU a page, ours "
              f"{row[f'asynccache_{way}_us']:6.1f}: {row[f'{way}_ratio']:.3f} x (goal {GOALS[way]}: {goal})",
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
