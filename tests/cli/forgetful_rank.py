"""A rank of ``asynccache stress``; number 1 leaves out every fifth write."""

from __future__ import annotations

import sys
from typing import Any

from asynccache.cli import rank
from asynccache.cli.engine import StandInEngine
from asynccache.cli.rank import read_duty


def forget() -> None:
    write, count = StandInEngine.write, iter(range(1 << 30))

    def writes(self: StandInEngine, pieces: Any) -> None:
        if next(count) % 5 != 3:
            write(self, pieces)

    StandInEngine.write = writes  # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "1":
        forget()
    sys.exit(rank.main(read_duty()))
