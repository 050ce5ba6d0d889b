"""The stress tool, while stores are attached and detached: nothing wrong, nothing left, no request fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asynccache import AsyncCache
from asynccache.cli import session
from asynccache.cli.main import main
from tests.cli.test_cli_runs import SMALL

EVERY = 8


class Attaching(session.Session):
    """A run beside which stores come and go, every few requests."""

    folder: Path
    changes: int

    @asynccontextmanager
    async def _exposed(self, cache: AsyncCache) -> AsyncIterator[None]:
        changing = asyncio.create_task(self._come_and_go(cache))
        try:
            yield
        finally:
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)

    async def _come_and_go(self, cache: AsyncCache) -> None:
        random, at = Random(1), 0
        urls = {"near": "memory:?capacity=8MiB", "disk": f"file:{self.folder}/kv?capacity=256MiB"}
        while True:
            while self.tally.served < at + EVERY:  # noqa: ASYNC110 - the tally is no Event
                await asyncio.sleep(0.002)
            at = self.tally.served
            for name, url in urls.items():
                if name not in cache.stores:
                    await cache.attach_storage(url, name=name, position=0 if name == "near" else None)
                elif random.random() < 0.6:
                    await cache.detach_storage(name, timeout=random.choice((0, 0.02)))
                type(self).changes += 1


@pytest.mark.slow
@pytest.mark.parametrize("faults", ["0", "0.1"])
def test_stores_come_and_go_under_stress(faults: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Attaching.folder, Attaching.changes = tmp_path, 0
    monkeypatch.setattr(session, "Session", Attaching)
    report = tmp_path / "report.json"
    status = main(["stress", *SMALL, "--requests", "500", "--storage", "none", "--faults", faults,
                   "--cancel-rate", "0.1", "--prefetch-policy", "wait_complete", "--json", str(report)])  # fmt: skip
    found: dict[str, Any] = json.loads(report.read_text())
    assert status == 0, found
    assert found["failed"] == found["verify"]["mismatches"] == 0
    assert Attaching.changes > 20
    assert found["tokens"]["hit"]["storage"] > 0
