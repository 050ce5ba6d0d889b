"""Random worlds by seeds that nobody has tried, on every core, for as long as there is time: ``make soak SECONDS=600``.

    python -m tests.soak.campaigns [--seconds 600] [--seed N] [--only NAME] [--workers N] [--once]

A *campaign* is a function that plays what one seed says, and raises whatever went wrong. The seeds are drawn from one
number, which is printed first. Each failure is printed with the command that plays it again; the exit status is 1 if
there was one. Hypothesis draws from constants of all modules that are imported, so what failed in ``core`` or
``scheduler`` after other campaigns may pass by itself: the blob in its error plays it again for certain.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from queue import Empty
from random import Random
from typing import Any, NamedTuple

import pytest

LARGEST = 1 << 32
PATIENCE = 300.0
SHOWN_EVERY = 5.0
HANGS = f"the process ended, or did not end within {PATIENCE:g} s\n"


class Played(NamedTuple):
    """One seed of one campaign; ``error`` is empty if all went well."""

    campaign: str
    seed: int
    error: str


# the campaigns


def worlds(seed: int) -> None:
    """The whole runtime in virtual time, with a hostile device and a lying store; seen by a subscriber, too."""
    from tests.worlds.test_worlds import test_a_world_is_seen_as_it_is as seen

    with pytest.MonkeyPatch.context() as patch:
        seen(seed, patch)


def hanging(seed: int) -> None:
    """The runtime, the scheduler and groups of ranks, with stores that hang: nobody waits longer than he must."""
    from tests.worlds.hanging import play

    play(seed)


def core(seed: int) -> None:
    """Calls of the core in any order, at length, over a random setting."""
    from tests.core.test_core_machine import COMPONENTS, OPTIONS, play

    random = Random(f"core {seed}")
    options = random.choice([{}, *OPTIONS])
    play(20, 100, random_seed=seed, components=random.choice(COMPONENTS), roomy=random.random() < 0.5, options=options)


def scheduler(seed: int) -> None:
    """Random caches, histories and requests under the scheduler: nothing admitted runs out, nothing starves."""
    from tests.shim.test_shim_worlds import played

    played(examples=20, random_seed=seed)


def engine(seed: int) -> None:
    """Real models on small pools, with failing storage and copies, aborts and retractions: no token changes."""
    from tests.engine import conftest  # noqa: F401  one thread, and no warnings of kernels that are missing
    from tests.engine.engine_models import FAMILIES
    from tests.engine.test_engine_paths import changes_no_token

    asyncio.run(changes_no_token(Random(f"engine {seed}").choice(FAMILIES), seed))


def file_store(seed: int) -> None:
    """A random walk over a store in a folder, with crashes, against a dict; then everything at once."""
    from tests.storage.test_file_recovery import agrees_with_a_dict, everything_at_once

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(agrees_with_a_dict(Path(folder), seed))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(everything_at_once(Path(folder), seed))


def ranks(seed: int) -> None:
    """The scheduler and its cache over two to eight ranks, in virtual time; copies and stores are late and fail."""
    from asynccache.worker import Topology
    from tests.shim.test_shim_ranks import SHAPES, play

    topology = Random(f"{seed}/topology").choice([*SHAPES, Topology(cp=2), Topology(tp=2, cp=2, pp=2)])
    assert not play(seed, topology).ends["failed"]


def groups(seed: int) -> None:
    """Whole caches with one to eight workers, in virtual time: rough devices, stores and links, accidents."""
    from tests.group.random_worlds import play

    play(seed)


CAMPAIGNS: Mapping[str, Callable[[int], None]] = {
    "worlds": worlds, "hanging": hanging, "core": core, "scheduler": scheduler, "engine": engine,
    "file-store": file_store, "ranks": ranks, "groups": groups,
}  # fmt: skip


# playing them


def play(name: str, seed: int) -> Played:
    """One seed, and what went wrong."""
    try:
        CAMPAIGNS[name](seed)
    except Exception:
        return Played(name, seed, traceback.format_exc())
    return Played(name, seed, "")


def work(number: int, names: Sequence[str], first: int, seconds: float, news: Any) -> None:
    """What one process does: campaigns in turn, so that each has as many seeds as the others, until time is over. It
    tells which seed it begins and how it ended, each with its own number, and ``None`` at its end."""
    logging.getLogger("asynccache").addHandler(logging.NullHandler())  # what a seed makes fail is no news
    random, end = Random(f"{first}/{number}"), time.monotonic() + seconds
    for name in cycle([*names[number:], *names[:number]]):
        if time.monotonic() >= end:
            break
        seed = random.randrange(LARGEST)
        news.put((number, Played(name, seed, HANGS)))
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        news.put((number, play(name, seed)))
        faulthandler.cancel_dump_traceback_later()
    news.put((number, None))


def campaign(names: Sequence[str], first: int, seconds: float, workers: int) -> int:
    """Play until time is over, and tell failures as they come; the number of them."""
    context = multiprocessing.get_context("spawn")
    news = context.Queue()
    team = {i: context.Process(target=work, args=(i, names, first, seconds, news)) for i in range(workers)}
    doing = {i: Played(names[i % len(names)], first, HANGS) for i in team}
    for process in team.values():
        process.start()
    count, failed, began, shown = Counter[str](), 0, time.monotonic(), 0.0
    while team:
        if (at := time.monotonic() - began) >= shown + SHOWN_EVERY:
            shown = at
            print(f"{at:6.0f} s  {count.total()} seeds played, {failed} failed", flush=True)
        try:
            number, found = news.get(timeout=1.0)
        except Empty:
            for number in [number for number, process in team.items() if not process.is_alive()]:
                tell(doing[number])
                failed += 1
                del team[number]
            continue
        if found is None:
            team.pop(number).join()
        elif found.error == HANGS:
            doing[number] = found
        else:
            count[found.campaign] += 1
            failed += bool(found.error)
            if found.error:
                tell(found)
    print(f"campaigns: {', '.join(f'{count[name]} of {name}' for name in names)}; {failed} failed", flush=True)
    return failed


def tell(failed: Played) -> None:
    again = f"python -m tests.soak.campaigns --only {failed.campaign} --seed {failed.seed} --once"
    print(f"{failed.error}FAILED {failed.campaign}, seed {failed.seed}; again: {again}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="campaigns", description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="when to begin no more (default: 600)")
    parser.add_argument("--seed", type=int, help="what all seeds are drawn from (default: a random number)")
    parser.add_argument("--only", choices=CAMPAIGNS, help="one campaign and not all of them")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: cores)")
    parser.add_argument("--once", action="store_true", help="play --seed itself, in this process, and nothing else")
    args = parser.parse_args(argv)
    first = secrets.randbelow(LARGEST) if args.seed is None else args.seed
    names = [args.only] if args.only else list(CAMPAIGNS)
    if args.once:
        found = [play(name, first) for name in names]
        for each in found:
            tell(each) if each.error else print(f"{each.campaign}, seed {each.seed}: right")
        return int(any(each.error for each in found))
    print(f"campaigns: {', '.join(names)} for {args.seconds:g} s on {args.workers} processes, seed {first}", flush=True)
    return int(campaign(names, first, args.seconds, args.workers) > 0)


if __name__ == "__main__":
    sys.exit(main())
