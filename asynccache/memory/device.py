"""The device contract: streams of copies and events that a coroutine can await.

A device runs copies in order on each stream and in no order between streams, except where ``wait_event`` says so. It
knows pools of pages and page ids; it never sees a tree, a lease or an operation.

The names of devices are ``cpu``, ``cuda`` and ``cuda:N``. Options may follow, as in a store's URL:
``cuda:0?blocks=16``. This module needs no torch, so a command line can be checked before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import parse_qsl

from asynccache.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from asynccache.memory.pools import PageCopy


class Event(Protocol):
    """A point in a stream. ``done`` and ``failed`` never block."""

    def done(self) -> bool:
        """Return True if the work before the event has ended, well or not."""
        ...

    def failed(self) -> bool:
        """Return True if that work has ended with an error, which ``wait`` raises. Final once ``done`` says True."""
        ...

    async def wait(self) -> None:
        """Return when the work before the event is done.

        Cancelling stops the waiting, never the work.

        Raises:
            CopyFailed: work that was submitted since the stream's previous event failed. After an error that ends a
            GPU's context (an illegal address, say) all later events raise it, too.
        """
        ...


class Gate(Event, Protocol):
    """An event that is fired by hand."""

    def open(self) -> None:
        """Let go of every stream and coroutine that waits. From any thread."""
        ...


class Stream(Protocol):
    """An ordered queue of work on the device."""

    name: str

    def record(self) -> Event:
        """Return an event that is done after all work submitted so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """Hold later work of this stream, on the device, until ``event`` is done. Does not block the caller. An event
        that is done already, of whatever kind, holds nothing. A failed event lets the work go on; only those who await
        the event learn of the failure."""
        ...


class CopyDirection(Enum):
    """The direction of a copy."""

    OUT = "device to host"
    IN = "host to device"
    WITHIN = "within the device"


class Device(Protocol):
    """One accelerator, or threads that behave like one."""

    name: str

    def stream(self, name: str) -> Stream:
        """Return a new stream. It lasts until ``release`` or ``aclose``."""
        ...

    def release(self, stream: Stream) -> None:
        """Take no more work for ``stream``. The stream is given back when all its work is done."""
        ...

    def gate(self) -> Gate:
        """Return a new event to open by hand: for an engine that computes in a thread, and for tests. ``aclose`` opens
        those that were forgotten."""
        ...

    def engine_event(self, event: object) -> Event:
        """Return ``event``, which an engine names, as one that every stream of this device can wait for. An event of
        the device's own is returned as it is. An event of another kind stands for the work that is recorded in it now;
        a later recording does not count. May be called from any thread.

        Raises:
            ConfigError: the device's streams cannot wait for it; the message names it and says what they can wait for.
        """
        ...

    def check_room(self, device: Mapping[str, int], host: Mapping[str, int]) -> None:
        """Refuse pools that do not fit together, before any is allocated. ``device``, ``host``: the bytes of each pool
        on that tier, by a text that says which pool it is.

        Raises:
            ConfigError: they do not fit; the message names the first pool that does not.
        """
        ...

    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return zeroed uint8 memory on the device."""
        ...

    def host_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return host memory (uint8, contiguous, 4 KiB aligned) that the device copies from and to at full speed."""
        ...

    def copy(self, stream: Stream, towards: CopyDirection, copies: Sequence[PageCopy]) -> None:
        """Enqueue one batch that goes out of the device or within it."""
        ...

    def load(self, stream: Stream, copies: Sequence[PageCopy], layers: int) -> Sequence[Event]:
        """Enqueue one batch from host to device, layer by layer, and return an event for each of the model's
        ``layers``: ``events[i]`` is done when layers 0..i of every copy are there. ``PoolSpec.model_layers`` says to
        which layers of the model those of a pool belong."""
        ...

    async def aclose(self) -> None:
        """Wait until every stream has let go of its buffers, then release the device."""
        ...


OPTIONS = ("blocks", "kernel_backups_below", "kernel_loads_below")
"""The names of a GPU's options. ``memory.cuda.settings.CudaSettings`` says what they mean."""


class DeviceName(NamedTuple):
    """A device's name, taken apart."""

    kind: str
    """"cpu" or "cuda"."""
    number: int = 0
    """CUDA's number of a GPU."""
    options: Mapping[str, str] = {}
    """The options by name, as text."""

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.number}"


def parse_device(text: str) -> DeviceName:
    """Return the parts of the name ``text``.

    Raises:
        ConfigError: it is no name of a device, or an option is unknown; the message says which there are.
    """
    place, _, query = text.partition("?")
    kind, colon, number = place.partition(":")
    if place != "cpu" and (kind != "cuda" or (colon and not re.fullmatch("[0-9]{1,9}", number))):
        raise ConfigError(f"unknown device {place!r}; one of cpu, cuda, cuda:N")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigError(f"device={place}: options are name=value with & between them") from None
    known = OPTIONS if kind == "cuda" else ()
    for name in options:
        if name not in known:
            raise ConfigError(f"device={place}: unknown option {name!r}; one of {', '.join(known) or 'none'}")
    return DeviceName(kind, int(number or 0), options)
