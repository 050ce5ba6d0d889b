"""A model cannot tell whether its KV was computed or came back, from whichever tier."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from asynccache_backends.memory import MemoryBackend

from tests.engine.engine_kit import CHILD, PAGE, prompt, run_child, served
from tests.engine.engine_models import FAMILIES

LENGTH = 61
CACHED = LENGTH // PAGE * PAGE


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_hit_on_the_device(family: str) -> None:
    async with served(family) as engine:
        assert (await engine.check(prompt(LENGTH))).cached == 0
        made = await engine.check(prompt(LENGTH))
        assert made.cached == CACHED
        assert made.hits == (CACHED, 0, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_hit_on_the_host_after_the_device_was_emptied(family: str) -> None:
    async with served(family) as engine:
        await engine.check(prompt(LENGTH))
        await engine.empty_device()
        assert (await engine.cache.match(prompt(LENGTH))).device == 0
        made = await engine.check(prompt(LENGTH))
        assert made.hits == (0, CACHED, 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_a_hit_in_storage_after_the_host_was_emptied_too(family: str) -> None:
    storage = MemoryBackend()
    async with served(family, host=64, storage=storage) as engine:
        await engine.check(prompt(LENGTH))
        await engine.empty_host()
        match = await engine.cache.match(prompt(LENGTH))
        assert (match.device, match.host) == (0, 0)
        made = await engine.check(prompt(LENGTH))
        assert made.hits == (0, 0, CACHED)
    await storage.aclose()


@pytest.mark.asyncio
async def test_a_hit_in_storage_in_a_new_process(tmp_path: Path) -> None:
    for family in FAMILIES:
        async with served(family, storage_url=f"file:{tmp_path / family}?capacity=64MiB&segment=8MiB") as engine:
            await engine.check(prompt(LENGTH))
    lines = run_child(tmp_path).splitlines()
    assert [line.split(" ")[0] for line in lines] == list(FAMILIES)
    for line in lines:
        assert f"(0, 0, {CACHED})" in line


OTHER = Path(transformers.__file__).parents[1] != Path(torch.__file__).parents[1]


@pytest.mark.skipif(not OTHER, reason="needs two versions of transformers: make test-transformers")
@pytest.mark.asyncio
async def test_another_version_of_transformers_finds_what_this_one_stored(tmp_path: Path) -> None:
    """An upgrade does not begin with an empty store. Here the child is the version of the gate."""
    for family in FAMILIES:
        async with served(family, storage_url=f"file:{tmp_path / family}?capacity=64MiB&segment=8MiB") as engine:
            await engine.check(prompt(LENGTH))
    root = CHILD.parents[2]
    paths = [str(root), str(root / "backends"), str(root / "scheduler_shim")]
    ran = await asyncio.to_thread(subprocess.run, [sys.executable, str(CHILD), str(tmp_path)], capture_output=True,
                                  text=True, timeout=120, check=True,
                                  env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)})  # fmt: skip
    assert [line.rpartition(" ")[0] for line in ran.stdout.splitlines()] == [
        f"{family} (0, 0, {CACHED})" for family in FAMILIES
    ]
