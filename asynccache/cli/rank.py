"""The program of one rank's process, ``python -m asynccache.cli.rank RANK``: it connects, opens its pools and stores,
and fills or verifies the pages that each batch names.

Its duty comes as a line of JSON on standard input, and the secret of the link is in the environment. When the run ends,
its account goes to standard output as JSON. The payload of a batch says which pages to fill or to verify; a rank that
finds wrong pages fails the batch, and reports the pages as the reason.

``shard_config`` is a rank's part of the model: its stage's layers of every pool, and its share of every page's bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import structs

from asynccache.cli.engine import Comparison, PageRun, StandInEngine, device_faults, faulty_stores, make_device
from asynccache.cli.meter import Meter, peak_rss
from asynccache.cli.options import RunSettings, loop_factory
from asynccache.config import CacheConfig, Component, Mamba, Sidecar
from asynccache.core.settings import ComponentKind
from asynccache.errors import AsyncCacheError, ConfigError, RankFailure
from asynccache.worker import EngineBatch, Topology, connect

ARRIVAL = 30.0
FAREWELL = 1.0
"""Seconds in which a rank that lost the command may close its stores by itself, as it does when its link ends."""


class Duty(msgspec.Struct, frozen=True):
    """The orders of a rank, which the command gives it at its start."""

    rank: int
    address: str
    """Where the head listens."""
    settings: RunSettings


_Part = TypeVar("_Part", Component, Sidecar)
_decoder = msgspec.msgpack.Decoder(tuple[bool, list[tuple[ComponentKind, bytes, bytes, int]]])


async def run(duty: Duty) -> dict[str, Any]:
    """Connect, carry out the batches until the head closes, and return the account: the rank's part of the report, as
    plain values. If this is cancelled, the head notices by itself."""
    settings, before, meter = duty.settings, asyncio.all_tasks(), Meter()
    account: dict[str, Any] = {"failure": None, "verify": {"pages": 0, "mismatches": 0}, "batches": 0}
    topology, delays = Topology(settings.tp, settings.cp, settings.pp), random.Random(f"{settings.seed}/{duty.rank}")
    place, shard = topology.place(duty.rank), partial(shard_config, topology=topology, rank=duty.rank)
    seed = settings.seed + 1000 * duty.rank  # faults are to differ by rank
    meter.start()

    def verified(batch: EngineBatch, done: Future[Comparison]) -> None:
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


def packed(pieces: Sequence[PageRun], *, verifies: bool) -> bytes:
    """Return a batch's payload that tells the ranks to verify these pages or, if ``verifies`` is False, to fill
    them."""
    parts = [(int(one.component), one.ids.tobytes(), one.values.tobytes(), one.first) for one in pieces]
    return msgspec.msgpack.encode((verifies, parts))


def unpacked(payload: bytes) -> tuple[bool, list[PageRun]]:
    """Return the order in a payload: True to verify pages or False to fill them, and the pages."""
    verifies, parts = _decoder.decode(payload)
    return verifies, [PageRun(kind, np.frombuffer(ids, np.int32).copy(), np.frombuffer(values, np.uint64).copy(), first)
                      for kind, ids, values, first in parts]


def complaint(verdict: Comparison) -> str:
    """Return the text with which a rank reports wrong pages."""
    return msgspec.json.encode(verdict._replace(what=verdict.what[:2])).decode()


def understood(rank: int, reason: str) -> Comparison | None:
    """Return the verdict of a ``complaint`` that ``rank`` has sent; None if ``reason`` is no complaint about pages."""
    try:
        found = msgspec.json.decode(reason, type=Comparison)
    except msgspec.MsgspecError:
        return None
    return found._replace(pages=0, what=(f"rank {rank}: {'; '.join(found.what)}",))


PLACE = "{rank}"


def shard_config(config: CacheConfig, topology: Topology, rank: int) -> CacheConfig:
    """Return the part of the head's ``config`` that ``rank`` has.

    Raises:
        ConfigError: layers or bytes of a part cannot be shared out; the message names it.
    """
    return structs.replace(
        config, components=tuple(_part(part, topology, rank) for part in config.components),
        sidecars=tuple(_part(part, topology, rank) for part in config.sidecars),
    )


def store_url(url: str) -> str:
    """Return the URL under which ranks store their pages; ``{rank}`` in it stands for the number of each. Only one
    process can own a folder, so each rank gets a folder within that of ``url``, unless ``url`` itself says
    ``{rank}``."""
    path, mark, options = url.partition("?")
    if PLACE in url or not path.startswith("file:"):
        return url
    return f"{path.rstrip('/')}/rank-{PLACE}{mark}{options}"


def _part(part: _Part, topology: Topology, rank: int) -> _Part:
    """Return a rank's part of a component or sidecar: its stage's layers, and its share of the bytes of each. A logical
    pool, which has slots without bytes, is the same on every stage."""
    setting = "bytes_per_page" if isinstance(part, Sidecar) else (
        "state_bytes" if isinstance(part, Mamba) else "bytes_per_token")
    size, layers, stages, stage = getattr(part, setting), part.layers, topology.pp, topology.place(rank).pp
    covers = part.covers or tuple(range(layers))
    if size:
        if layers < stages:
            raise ConfigError(f"--pp={stages}: a stage would have no layer, there are --layers={layers}")
        covers = covers[stage * layers // stages : (stage + 1) * layers // stages]
    over = dataclasses.replace(topology, **dict.fromkeys(part.replicated.over, 1))
    parts = layers * over.tp * over.cp
    if size % parts:
        what = (f"sidecar {part.name!r}: {size} bytes a page" if isinstance(part, Sidecar) else
                f"--{'mamba-bytes' if isinstance(part, Mamba) else 'bytes-per-token'}={size}")
        raise ConfigError(f"{what} must be a multiple of {parts}: {layers} layers over tp {over.tp} and cp {over.cp}")
    return structs.replace(part, **{setting: size // parts * len(covers)}, layers=len(covers), covers=covers)


def read_duty() -> Duty:
    """Read this process's duty from standard input, and end the process when the command is gone."""
    duty = msgspec.json.decode(sys.stdin.buffer.readline(), type=Duty)
    threading.Thread(target=_end_with_the_command, name="asynccache-parent", daemon=True).start()
    return duty


def _end_with_the_command() -> None:
    while os.read(0, 1):
        pass
    time.sleep(FAREWELL)
    os._exit(2)


def main(duty: Duty) -> int:
    """Carry out ``duty``, and return the exit status: 0, or 2 for an error of asynccache, which is written to standard
    error."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the command decides what they mean, and ends its ranks
        signal.signal(number, signal.SIG_IGN)
    import torch  # takes seconds, and a command that is killed meanwhile ends this process, too

    torch.set_num_threads(1)
    try:
        with asyncio.Runner(loop_factory=loop_factory(duty.settings.loop)) as runner:
            account = runner.run(run(duty))
    except AsyncCacheError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    json.dump(account, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(read_duty()))
