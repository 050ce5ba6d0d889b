"""CUDA events: points in streams that coroutines, threads and other streams wait for.

Law: an event that was never recorded reads as complete, so nobody looks at a handle before ``recorded``; and a handle
that has fired is used again, so nobody looks at one after that. Both are checked under the stream's lock.
"""

from __future__ import annotations

import threading
from typing import Protocol

from asynccache.errors import ConfigError
from asynccache.memory.cuda.driver import Driver, DriverError
from asynccache.memory.signals import Bells, Signal, Work


class EventPool:
    """Handles of events, used again and again. Thread-safe."""

    def __init__(self, driver: Driver) -> None:
        self.created = 0
        self._driver = driver
        self._lock = threading.Lock()
        self._free: list[int] = []

    def take(self) -> int:
        """A handle that nobody else uses."""
        with self._lock:
            if self._free:
                return self._free.pop()
            self.created += 1
        return self._driver.event_create()

    def give(self, handle: int) -> None:
        """It has fired, and nobody will ask for it again."""
        with self._lock:
            self._free.append(handle)

    def close(self) -> None:
        """Destroy those that are not in use."""
        with self._lock:
            free, self._free = self._free, []
        for handle in free:
            self._driver.event_destroy(handle)


class Context:
    """What all streams of a device share. ``failure``: the error after which the driver does nothing any more."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.bells = Bells()
        self.events = EventPool(driver)
        self.failure: DriverError | None = None

    def fail(self, error: DriverError) -> DriverError:
        """The device has failed; the first error is kept."""
        if self.failure is None:
            self.failure = error
        return self.failure


class Source(Protocol):
    """The stream of an event, as the event sees it."""

    name: str
    context: Context
    condition: threading.Condition

    def held_by(self) -> Signal | None:
        """What its submitter waits for on the host."""
        ...


class CudaEvent(Signal):
    """A point in a stream. Thread-safe."""

    def __init__(self, stream: Source) -> None:
        super().__init__(stream.context.bells, stream.name, stream.condition)
        self.stream = stream
        self.failure: Exception | None = None   # what its work failed of before it reached the device
        self.recorded = False
        self.keep: object = None                # who owns the memory of the work before it
        self._handle: int | None = None

    def record_as(self, handle: int | None) -> None:
        """It is on the device now; ``None``: it never will be, and ``failure`` says why."""
        with self.stream.condition:
            self._handle, self.recorded = handle, True
            self.stream.condition.notify_all()

    def await_recorded(self) -> None:
        """Hold the thread until the event is on the device: as long as its submission takes, never as long as its work.

        Raises:
            ConfigError: its submission waits for something that the host is to do, which may be the caller.
        """
        while not self._soon(0.05):
            gate = self._gate()
            if gate is not None:
                raise ConfigError(f"an engine's stream cannot wait for {self!r}: the host holds it with {gate!r}")

    def _soon(self, seconds: float | None) -> bool:
        with self.stream.condition:
            return self.stream.condition.wait_for(lambda: self.recorded or self._fired, seconds)

    def await_submitted(self) -> None:
        """As ``await_recorded``, however long it takes: for submitters."""
        self._soon(None)

    def _gate(self) -> Signal | None:
        """The gate at the end of the chain of submitters that wait for each other, if there is one."""
        held: Signal | None = self
        while isinstance(held, CudaEvent):
            held = held.stream.held_by()
        return held

    def hold(self, stream: int) -> None:
        """Later work of ``stream`` waits for this event, which is recorded, on the device."""
        with self.stream.condition:
            if self._handle is not None and not self._fired:
                self.stream.context.driver.stream_wait_event(stream, self._handle)

    def happened(self) -> bool:
        """Whether it has, without waiting. Its failure is noted. For the waiter."""
        try:
            return self._handle is None or self.stream.context.driver.event_query(self._handle)
        except DriverError as error:
            self._failed(error)
            return True

    def synchronize(self) -> None:
        """Sleep until it has happened. Its failure is noted. For the waiter."""
        try:
            if self._handle is not None:
                self.stream.context.driver.event_synchronize(self._handle)
        except DriverError as error:
            self._failed(error)

    def _failed(self, error: DriverError) -> None:
        self.failure = self.stream.context.fail(error)

    def land(self) -> list[Work]:
        """It has happened: who is to be told. Its handle goes back, unless the device has failed."""
        callbacks = self.settle(self.failure)
        handle, self._handle, self.keep = self._handle, None, None
        if handle is not None and self.stream.context.failure is None:
            self.stream.context.events.give(handle)
        return callbacks


class CudaGate(Signal):
    """An event that somebody fires by hand: a test that holds a stream, an engine that computes on the host."""

    def __init__(self, bells: Bells, shut: dict[CudaGate, None]) -> None:
        super().__init__(bells, "gate")
        self._shut = shut

    def open(self) -> None:
        """Let go of every stream and coroutine that waits. From any thread."""
        self._shut.pop(self, None)
        self.fire()
