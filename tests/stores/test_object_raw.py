"""The raw client that the benchmark holds ours against: what it put it gets, in any order, and it leaves nothing."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from asynccache_backends.object_store.raw import raw

from asynccache.storage import parse_url


@pytest.mark.asyncio
async def test_the_raw_client_gives_back_what_it_got(tmp_path: Path) -> None:
    client, rng = await raw(parse_url(f"object-file:{tmp_path}/store")), Random(3)
    keys = [rng.randbytes(32) for _ in range(40)]
    pages = [memoryview(rng.randbytes(300_000)) for _ in keys]
    await client.put(keys[:30], pages[:30])
    await client.put(keys[30:], pages[30:])
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert sorted(path.stat().st_size for path in files) == [300_000 * n for n in (4, 10, 13, 13)]
    for order in (range(40), rng.sample(range(40), 25)):
        into = [memoryview(bytearray(300_000)) for _ in order]
        await client.get([keys[i] for i in order], into)
        assert into == [pages[i] for i in order]
    await client.aclose()
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
