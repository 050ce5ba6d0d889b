"""Why fragments of some size go the way they do on this machine: the chosen path beside the others, in plain words.

Pure. What was measured for a table decides the words, not the choice: that was made when the device opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from asynccache.cli.text import size as spelled
from asynccache.errors import ConfigError
from asynccache.memory.naming import parse_device

SIZES = {"small": 4 << 10, "medium": 64 << 10, "large": 2 << 20}

HOW = {
    "dma": "the copy engines move each of them by itself",
    "pitched": "the copy engines move rows of neighbours in one call",
    "staged": "a kernel puts whole pages together on the device, then the copy engines move those",
    "kernel": "a kernel on some multiprocessors moves them straight between the device and pinned memory",
}
KERNELS = ("kernel", "staged")
CLOSE = 1.05
"""What is nearer than this is called as fast."""


def gpu(text: str) -> str:
    """For argparse: the name of a GPU.

    Raises:
        ConfigError: it is none; argparse says so, since it is a ValueError.
    """
    if parse_device(text).kind != "cuda":
        raise ConfigError(f"{text} is no GPU")
    return text


class Choice(NamedTuple):
    """``rates``: GB/s of scattered fragments by each path. ``neighbours``: by which path those go that lie behind each
    other, and how fast. ``forced``: a setting chose the path."""

    direction: str
    name: str
    width: int
    chosen: str
    rates: Mapping[str, float]
    neighbours: tuple[str, float]
    forced: bool

    def told(self) -> Iterator[str]:
        """What will be used, and why."""
        rate = f"{self.rates[self.chosen]} GB/s"
        yield f"{self.direction}, {self.name} fragments ({spelled(self.width)}): {self.chosen} will be used, {rate}"
        yield f"    {HOW[self.chosen]}; {self.why()}"
        if self.neighbours[0] != self.chosen:
            yield f"    neighbours: {self.neighbours[0]} will be used, {self.neighbours[1]} GB/s"

    def why(self) -> str:
        """The reason, with the path that comes nearest."""
        others = {path: rate for path, rate in self.rates.items() if path != self.chosen}
        if not others:
            return "no other path can do it"
        rival = max(others, key=lambda path: others[path])
        times = self.rates[self.chosen] / others[rival] if others[rival] else 1.0
        beside = f"{rival} makes {others[rival]} GB/s"
        if self.forced:
            return f"the settings say so; {beside}"
        if times >= CLOSE:
            return f"it is {times:.2f} times as fast as the next best: {beside}"
        if rival in KERNELS and self.chosen not in KERNELS:
            return f"{beside}, which is not enough more for the multiprocessors that it takes from whoever computes"
        if times > 1 / CLOSE:
            return f"it is as fast as any: {beside}"
        return f"it was estimated to be the fastest when the device opened, yet here {beside}"
