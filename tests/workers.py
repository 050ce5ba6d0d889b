"""Shared by the workers of one run of pytest (pytest-xdist): the order of tests, and things that are made only once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
LONG = 5.0
"""Seconds. A slow test that takes longer says so: ``slow(seconds)``."""


def dealt(tests: Sequence[T], seconds: Callable[[T], float], file: Callable[[T], object], workers: int) -> list[T]:
    """The order in which ``--dist worksteal`` gives each worker its share of the slow tests first, and then ordinary
    tests as they follow each other in their files.

    ``seconds`` says how long a test takes; 0: it is an ordinary one. Slow tests of a file stay together, for they may
    have an expensive fixture in common; a test of more than ``LONG`` seconds goes by itself. The scheduler cuts the
    list into one share for each worker, as equal in number as can be, and a worker that has finished takes from the end
    of another's share.
    """
    groups: dict[object, list[T]] = {}
    for test in tests:
        if seconds(test):
            groups.setdefault(test if seconds(test) > LONG else file(test), []).append(test)

    def cost(share: list[T]) -> float:
        return sum(map(seconds, share))

    shares: list[list[T]] = [[] for _ in range(workers)]
    for group in sorted(groups.values(), key=cost, reverse=True):
        min(shares, key=cost).extend(group)
    ordinary = [test for test in tests if not seconds(test)]
    order: list[T] = []
    for worker, share in enumerate(shares):
        room = max(0, (len(tests) - len(order)) // (workers - worker) - len(share))
        order += share + ordinary[:room]
        del ordinary[:room]
    return order + ordinary


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that ``make`` has filled, once for all workers of a run: the first that asks makes it, and the others
    wait for that. Return the folder when it is complete; tests only read what lies in it."""
    own = factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, complete = shared / name, shared / f"{name}.complete"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)               # until the file is closed
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder
