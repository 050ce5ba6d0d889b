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
from asynccache.worker import EngineBatch, Topology, connect

ARRIVAL = 30.0


async def run(duty: Duty) -> dict[str, Any]:
    """Connect, carry out the batches until the head closes, and return the account: the rank's part of the report, as
    plain values. If this is cancelled, the head notices by itself."""
    settings, before, meter = duty.settings, asyncio.all_tasks(), Meter()
    account: dict[str, Any] = {"failure": None, "verify": {"pages": 0, "mismatches": 0}, "batches": 0}
    topology, delays = Topology(settings.tp, settings.cp, settings.pp), random.Random(f"{settings.seed}/{duty.rank}")
    place, shard = topology.place(duty.rank), partial(shard_config, topology=topology, rank=duty.rank)
    seed = settings.seed + 1000 * duty.rank  # faults are to differ by rank
    meter.start()

    def verified(batch: EngineBatch, done: Future[Verdict]) -> None:
        """End a batch that has been verified. Called in the engine's thread."""
        if (error := done.exception()) is not None:
            batch.fail(f"verifying failed: {error!r}")
            return
        verdict, count = done.result(), account["verify"]
        count["pages"] += verdict.pages
        count["mismatches"] += verdict.wrong
        if verdict.wrong:
            batch.fail(complaint(verdict))
        else:
            batch.end()

    device = make_device(settings.device, device_faults(settings.faults, seed))
    try:
        with faulty_stores(settings.faults, seed):
            async with connect(duty.address, duty.rank, shard=shard, device=device, arrival=ARRIVAL) as worker:
                part = (place.tp, topology.tp, (place.cp, topology.cp), (place.pp, topology.pp))
                specs = [spec.on_rank(*part) for spec in worker.config.pools()]
                engine = StandInEngine(specs, worker.pools, device.gate)
                try:
                    async for batch in worker:
                        if settings.rank_delay:
                            await asyncio.sleep(delays.random() * settings.rank_delay / 1e3)
                        verifies, pieces = unpacked(batch.payload)
                        account["batches"] += 1
                        done, event = engine.submit(partial(engine.perform, pieces, verifies=verifies))
                        if verifies:
                            done.add_done_callback(partial(verified, batch))
                        else:
                            batch.end(event)
                finally:
                    engine.close()
    except RankFailure as error:
        account["failure"] = {"kind": type(error).__name__, "sentence": str(error), "at": time.time()}
    finally:
        await device.aclose()
    meter.stop()
    lag = {name: round(value, 4) for name, value in meter.lag.spread(1e3)._asdict().items()}
    return account | {"leaks": {"tasks": len(asyncio.all_tasks() - before)}, "loop_lag_ms": lag,
                      "cpu_s": round(meter.cpu(), 3), "rss_bytes": peak_rss()}


def main(duty: Duty) -> int:
    """Carry out ``duty``, and return the exit status: 0, or 2 for an error of asynccache, which is written to standard
    error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the command decides what they mean, and ends its ranks
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=loop_factory(duty.settings.loop)) as runner:
            account = runner.run(run(duty))
    except AsyncCacheError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    json.dump(account, sys.stdout)
    return 0
