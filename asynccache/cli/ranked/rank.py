"""One rank's run: it connects, opens its pools and stores, and fills or verifies the pages that each batch names.

The secret of the link is in the environment. When the run ends, its account goes to standard output as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from asynccache.cli.engine import StandInEngine, Verdict
from asynccache.cli.machine import device_faults, faulty_stores, make_device
from asynccache.cli.meter import Meter, peak_rss
from asynccache.cli.options import loop_factory
from asynccache.cli.ranked.duty import Duty
from asynccache.cli.ranked.engine import complaint, shard_config, unpacked
from asynccache.errors import AsyncCacheError, RankFailure
from asynccache.worker import EngineBatch, RankWorker, Topology, connect

ARRIVAL = 30.0


class Rank:
    """One rank's run, from its duty to its account. Mutable state: the account, which is the rank's part of the report
    of the run, as plain values."""

    def __init__(self, duty: Duty) -> None:
        self.account: dict[str, Any] = {"failure": None, "verify": {"pages": 0, "mismatches": 0}, "batches": 0}
        self._duty = duty
        self._settings = settings = duty.settings
        self._seed = settings.seed + 1000 * duty.rank          # faults are to differ by rank
        self._random = random.Random(f"delays {settings.seed}/{duty.rank}")

    async def run(self) -> None:
        """Connect, carry out the batches until the head closes, and complete the account. If this is cancelled, the
        head notices by itself."""
        before, meter = asyncio.all_tasks(), Meter()
        meter.start()
        try:
            await self._serve()
        except RankFailure as error:
            self.account["failure"] = {"kind": type(error).__name__, "sentence": str(error), "at": time.time()}
        meter.stop()
        lag = {name: round(value, 4) for name, value in meter.lag_ms()._asdict().items()}
        self.account |= {"leaks": {"tasks": len(asyncio.all_tasks() - before)}, "loop_lag_ms": lag,
                         "cpu_s": round(meter.cpu(), 3), "rss_bytes": peak_rss()}

    async def _serve(self) -> None:
        duty, settings = self._duty, self._settings
        topology = Topology(settings.tp, settings.cp, settings.pp)
        place, shard = topology.place(duty.rank), partial(shard_config, topology=topology, rank=duty.rank)
        device = make_device(settings.device, device_faults(settings.faults, self._seed))
        try:
            with faulty_stores(settings.faults, self._seed):
                async with connect(duty.address, duty.rank, shard=shard, device=device, arrival=ARRIVAL) as worker:
                    part = (place.tp, topology.tp, (place.cp, topology.cp), (place.pp, topology.pp))
                    specs = [spec.on_rank(*part) for spec in worker.config.pools()]
                    engine = StandInEngine(specs, worker.pools, device.gate)
                    try:
                        await self._work(worker, engine)
                    finally:
                        engine.close()
        finally:
            await device.aclose()

    async def _work(self, worker: RankWorker, engine: StandInEngine) -> None:
        async for batch in worker:
            if self._settings.rank_delay:
                await asyncio.sleep(self._random.random() * self._settings.rank_delay / 1e3)
            verifies, pieces = unpacked(batch.payload)
            self.account["batches"] += 1
            done, event = engine.submit(partial(engine.perform, pieces, verifies=verifies))
            if verifies:
                done.add_done_callback(partial(self._verified, batch))
            else:
                batch.end(event)

    def _verified(self, batch: EngineBatch, done: Future[Verdict]) -> None:
        """End a batch that has been verified. Called in the engine's thread."""
        if (error := done.exception()) is not None:
            batch.fail(f"verifying failed: {error!r}")
            return
        verdict, count = done.result(), self.account["verify"]
        count["pages"] += verdict.pages
        count["mismatches"] += verdict.wrong
        if verdict.wrong:
            batch.fail(complaint(verdict))
        else:
            batch.end()


def main(duty: Duty) -> int:
    """Carry out ``duty``, and return the exit status: 0, or 2 for an error of asynccache, which is written to standard
    error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the command decides what they mean, and ends its ranks
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    rank = Rank(duty)
    try:
        with asyncio.Runner(loop_factory=loop_factory(duty.settings.loop)) as runner:
            runner.run(rank.run())
    except AsyncCacheError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    json.dump(rank.account, sys.stdout)
    return 0
