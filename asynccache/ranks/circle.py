"""A process group of ``torch.distributed`` as one rank sees it: calls that block, and what their failures mean.

Law: the first failure is the last; gloo closes every connection of a group with the first call that times out, and no
such group can be mended. Every call has a time-out of its own, whatever the group's is (torch's: 30 minutes).

How a blocked call is ended: not by ``abort``, ``shutdown`` or ``destroy_process_group``, which in gloo (torch 2.13) end
nothing; it lasts until its time-out. A receive that times out at once does: it closes the group's connections, which
ends what is blocked here and tells the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from asynccache.errors import RankFailure
from asynccache.ranks.frames import Words

if TYPE_CHECKING:
    from torch.distributed import AllreduceOptions, ProcessGroup, Work

FRAMES, NOTHING = 0, 1  # tags: what links send, and what nobody ever sends


class Circle:
    """``ranks``: its members by the numbers that errors name them by; ``index``: which of them is this one. ``own``:
    the group was made here, and is closed here."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], index: int, timeout: float, *, own: bool) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self.own = own
        self.failure = ""
        self._group = group
        self._timeout = timeout
        self._peers = _one_of([rank for i, rank in enumerate(self.ranks) if i != index])
        self._lowest, self._highest = _options(timedelta(seconds=timeout))

    def __repr__(self) -> str:
        return f"Circle({self.index} of {self.ranks}{', ' if self.failure else ''}{self.failure})"

    def check(self) -> None:
        """Nothing may be tried again."""
        if self.failure:
            raise RankFailure(self.failure)

    def fail(self, reason: str) -> None:
        """The first reason stays."""
        self.failure = self.failure or reason

    # calls that block

    def minimum(self, words: Words) -> Words:
        """The MIN over the members, in place."""
        self._reduce(words, self._lowest)
        return words

    def send(self, to: int, words: Words) -> None:
        """Until member ``to`` has received it."""
        from torch import from_numpy

        tensor = from_numpy(words)
        self._wait(f"rank {self.ranks[to]}", lambda: self._group.send([tensor], to, FRAMES))

    def receive(self, source: int, length: int) -> Words:
        """The next frame from member ``source``."""
        from torch import from_numpy

        words = np.empty(length, np.int64)
        tensor = from_numpy(words)
        self._wait(f"rank {self.ranks[source]}", lambda: self._group.recv([tensor], source, FRAMES))
        return words

    def gather(self, content: bytes, patience: float | None = None) -> list[bytes]:
        """What every member gives, in their order: sizes first, then all in one table of the longest's width.
        ``patience``: seconds until all have come, instead of the time-out."""
        sizes = np.zeros(len(self.ranks), np.int64)
        sizes[self.index] = len(content)
        self._reduce(sizes, self._highest, patience)
        table = np.zeros((len(self.ranks), int(sizes.max())), np.uint8)
        table[self.index, : len(content)] = np.frombuffer(content, np.uint8)
        self._reduce(table, self._highest)
        return [row[:size].tobytes() for row, size in zip(table, sizes.tolist(), strict=True)]

    def cut(self) -> None:
        """Close every connection; what is blocked here ends, and peers hear of it."""
        from torch import empty

        self.fail("closed here")
        for peer in range(len(self.ranks)):  # one that is gone does not time out, and so closes nothing
            if peer != self.index:
                with suppress(RuntimeError):
                    self._group.recv([empty(1)], peer, NOTHING).wait(timedelta(milliseconds=1))

    def let_go(self) -> None:
        """Nothing is called any more. Here a group of our own ends, which joins threads of torch's: a process that ends
        meanwhile is aborted. So this comes before anybody hears that closing is done."""
        self.fail("closed here")  # the lane has ended: a call would wait for ever
        if self.own:
            del self._group

    def _reduce(self, content: npt.NDArray[Any], options: AllreduceOptions, patience: float | None = None) -> None:
        from torch import from_numpy

        tensor = from_numpy(content)
        if patience is not None:
            _, options = _options(timedelta(seconds=patience))
        self._wait(self._peers, lambda: self._group.allreduce([tensor], options), patience)

    def _wait(self, peers: str, call: Callable[[], Work | None], patience: float | None = None) -> None:
        self.check()
        seconds = self._timeout if patience is None else patience
        try:
            work = call()
            assert work is not None
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
            self.fail(f"{peers} " + (f"did not answer within {seconds:g} s" if late else "closed the connection"))
            raise RankFailure(self.failure) from error


def _one_of(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"one of ranks {', '.join(map(str, ranks))}"


def _options(patience: timedelta) -> list[AllreduceOptions]:
    """For MIN and for MAX."""
    from torch.distributed import AllreduceOptions, ReduceOp

    options = []
    for operation in (ReduceOp.MIN, ReduceOp.MAX):
        option = AllreduceOptions()
        option.reduceOp = ReduceOp(operation)
        option.timeout = patience
        options.append(option)
    return options
