"""CUDA events: points in streams that coroutines, threads and other streams wait for.

Law: an event that was never recorded reads as complete, so nobody looks at a handle before ``recorded``; and a handle
that has fired is used again, so nobody looks at one after that. Both are checked under the stream's lock. An event
whose recording was refused has no handle, and fires when its stream is empty: nobody is told of an end before it.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from asynccache.errors import ConfigError, forget_frames
from asynccache.memory.cuda.driver import Driver, DriverError
from asynccache.memory.signals import Bells, Signal, Work

PATIENCE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 5.0)
"""Seconds between the attempts to ask a driver that refuses to tell of an event and has not failed: while an engine
captures a graph, say."""


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
        handle = self._driver.event_create()
        with self._lock:
            self.created += 1
        return handle

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

    def refused(self, error: Exception) -> Exception:
        """What a refused call tells: the device has failed, or else nothing but the call."""
        if not isinstance(error, DriverError):
            return error
        forget_frames(error)
        return self.fail(error) if error.sticky else error

    def use_device(self) -> None:
        """For a new thread of the device's. If it cannot be chosen, the device has failed: events tell of it."""
        try:
            self.driver.use_device()
        except DriverError as error:
            self.fail(error)


class Source(Protocol):
    """The stream of an event, as the event sees it."""

    name: str
    handle: int
    context: Context
    condition: threading.Condition

    def held_by(self) -> Signal | None:
        """What its submitter waits for on the host."""
        ...

    def give_up(self, error: Exception) -> Exception:
        """The driver does not tell of the stream's work any more; what the events fail of."""
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
        """It is in the stream now; ``None``: it never will be, and ``failure`` says why."""
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

    def hold(self, stream: int) -> bool:
        """Later work of ``stream`` waits for this event, which is recorded, on the device. False: it has no handle, and
        has not happened.

        Raises:
            DriverError: the driver refused that.
        """
        with self.stream.condition:
            if self._handle is not None and not self._fired:
                self.stream.context.driver.stream_wait_event(stream, self._handle)
            return self._handle is not None or self._fired

    def happened(self) -> bool:
        """Whether it has, without waiting. Its failure is noted. For the waiter; never raises."""
        context = self.stream.context
        if self._handle is None:
            return context.failure is not None
        try:
            return context.driver.event_query(self._handle)
        except Exception as error:
            context.refused(error)
            return self._is_lost()

    def synchronize(self) -> None:
        """Sleep until it has happened, or nobody will ever know. Its failure is noted. For the waiter; never raises."""
        for pause in PATIENCE:
            try:
                self._sleep()
                return
            except Exception as error:
                self.stream.context.refused(error)
                if self._is_lost():
                    return
                last = error
                time.sleep(pause)
        self.failure = self.stream.give_up(last)

    def _sleep(self) -> None:
        context = self.stream.context
        if self._handle is not None:
            context.driver.event_synchronize(self._handle)
        elif context.failure is None:
            context.driver.stream_synchronize(self.stream.handle)

    def _is_lost(self) -> bool:
        """The device has failed, and this event with it."""
        self.failure = self.stream.context.failure or self.failure
        return self.stream.context.failure is not None

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
