"""The part of the driver that the CUDA device uses: cupy's streams and events, its calls of the CUDA runtime, and those
of ``libcuda``. The tests' simulated driver is a subclass.

* Waiting: ``event_synchronize``, ``stream_synchronize`` and ``device_tensor`` wait for the device's work, and
  ``host_register`` and ``host_alloc`` for the system. No other call waits. A call that may take long lets go of the
  GIL.
* Threads: ``copy``, ``launch``, ``event_synchronize`` and ``stream_synchronize`` come only from threads that have
  called ``use_device``. Every other call may come from any thread, leaves that thread's current device as it is, and
  harms no graph that is captured elsewhere.
* Values: addresses are integers, and handles are whatever the driver makes. Every error is a ``DriverError``.

Without a GPU ``import cupy`` works, but every call of cupy raises. So ``find`` checks once what this machine lacks, and
says it in one sentence.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from asynccache.errors import ConfigError
from asynccache.extras import install
from asynccache.memory.cuda import kernels
from asynccache.memory.cuda.kernels import Table
from asynccache.memory.cuda.libcuda import OVERLAP_WITH_COMPUTE, DriverError, LibCuda, Spans
from asynccache.memory.device import CopyDirection

StreamHandle = Any
EventHandle = Any

_P = ParamSpec("_P")
_T = TypeVar("_T")

_KIND = {CopyDirection.OUT: 2, CopyDirection.IN: 1, CopyDirection.WITHIN: 3}
_HIGHEST_PRIORITY = -99  # the driver takes its own highest for it; it counts for kernels, not for the copy engines
_PORTABLE_AND_MAPPED = 1 | 2
_BATCHED_PER_ENTRY = 8
"""Copies of one call that count as one entry of the driver's queue. How many entries they really take is not
documented."""
_ENTRIES_OF_A_LAUNCH = 2
"""Entries of the driver's queue that a launch counts as. How many its 4 KiB of parameters really take is not documented
either."""


class DeviceIdentity(NamedTuple):
    """The identity of a device, and what it can do."""

    name: str
    capability: tuple[int, int]
    """CUDA's compute capability, major and minor."""
    total: int
    """The device's memory in bytes."""
    bus: str
    """The device's PCI address."""
    driver: int
    """The version of CUDA that the driver is for, 13020 for 13.2."""
    batches: bool
    """True if the driver takes many copies in one call."""
    registers: bool
    """True if the device sees memory that was pinned by ``host_register`` at its own address; under WSL2 it does
    not."""


class FoundCuda(NamedTuple):
    """The parts of CUDA that this machine has; None for a part that it has not."""

    cupy: str | None
    torch_cuda: str | None
    devices: int
    driver: int | None
    missing: str
    """Why there can be no CUDA device, in a sentence; "" if there can."""
    cupy_cuda: int | None = None  # the version of CUDA that cupy was built for


def find() -> FoundCuda:
    """Return which parts of CUDA this machine has. Never raises."""
    torch_cuda: str | None = torch.version.cuda
    cupy: Any = None
    try:
        with warnings.catch_warnings():  # cupy warns of other copies of itself, and of what it is used with
            warnings.simplefilter("ignore")
            cupy = import_module("cupy")
        version, runtime = str(cupy.__version__), cupy.cuda.runtime
    except Exception as error:  # a broken installation raises whatever it likes
        how = f"{install('cuda12')} (for CUDA 12) or {install('cuda13')}"
        return FoundCuda(None, torch_cuda, 0, None, f"{_unusable(cupy, error)}: {how}")
    driver = _or_none(lambda: int(runtime.driverGetVersion())) or None
    devices = _or_none(lambda: int(runtime.getDeviceCount())) or 0
    return FoundCuda(version, torch_cuda, devices, driver, _missing(driver, devices, torch_cuda),
                 _or_none(lambda: int(runtime.runtimeGetVersion())))  # fmt: skip


def _unusable(cupy: Any, error: Exception) -> str:
    """Return, in a sentence, what is wrong with the module that was imported as cupy, or why the import failed."""
    if cupy is not None:  # a folder called cupy is a module without anything in it
        where = getattr(cupy, "__file__", None) or ", ".join(map(str, getattr(cupy, "__path__", ())))
        return f"what is imported as cupy ({where}) is not cupy: {error}"
    return "cupy is not installed" if isinstance(error, ImportError) else f"cupy does not import: {error}"


def _missing(driver: int | None, devices: int, torch_cuda: str | None) -> str:
    if driver is None:
        return "there is no NVIDIA driver on this machine"
    if not devices:
        return "the NVIDIA driver sees no GPU"
    if torch_cuda is None:
        return "this build of torch is for the CPU: install one for CUDA, since pools are its tensors"
    return _refused_by_torch(driver, torch_cuda)


def _refused_by_torch(driver: int, torch_cuda: str) -> str:
    """Return why torch cannot use the driver, as torch says in a warning; "" if it can. Mostly the driver is too old
    for torch's CUDA."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    why = ": " + str(said[0].message).splitlines()[0] if said else ""
    return f"torch is built for CUDA {torch_cuda} and cannot use a driver for CUDA {spelled_version(driver)}{why}"


def spelled_version(number: int) -> str:
    """Return a version of CUDA as people write it: 13.2 for 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"


def _or_none(call: Callable[[], int]) -> int | None:
    try:
        return call()
    except Exception:  # CUDARuntimeError, without a class to be had before cupy is there
        return None


@contextmanager
def _translated() -> Iterator[None]:
    """Raise errors of cupy and torch, which are all RuntimeError, as ``DriverError``."""
    try:
        yield
    except RuntimeError as error:
        code = getattr(error, "status", getattr(error, "error_code", None))  # cupy's name for it, and torch's
        raise DriverError(str(error), code if isinstance(code, int) else None) from error


def _on_device(call: Callable[Concatenate[CupyDriver, _P], _T]) -> Callable[Concatenate[CupyDriver, _P], _T]:
    """Wrap ``call``, which works on the thread's current device, so that it works on the driver's device. The call may
    come from a thread whose current device is another one. torch restores that device afterwards, without making a
    context where there is none.

    A thread that is on the device from its start may have no context all the same, and calls of the driver (not of the
    runtime) would be refused there. Setting the device once gives it one.

    While any thread captures a graph, CUDA refuses many calls of all threads, and the graph is spoilt; so the thread is
    relaxed for the call."""

    @wraps(call)
    def on_device(driver: CupyDriver, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _translated(), driver.library.relaxed():
            here = driver.runtime.getDevice() == driver.index
            with nullcontext() if here else torch.cuda.device(driver.index):
                if not (here and getattr(driver.thread, "has_context", False)):
                    driver.runtime.setDevice(driver.index)
                    driver.thread.has_context = here
                return call(driver, *args, **kwargs)

    return on_device


class _Foreign(NamedTuple):
    """A stream or an event of an engine's, by its pointer: what cupy's methods ask of such an object."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


class CupyDriver:
    """The driver for one device. ``index`` is CUDA's number of it; ``runtime`` is cupy's."""

    def __init__(self, index: int) -> None:
        found = find()
        if found.missing:
            raise ConfigError(f"device=cuda:{index}: {found.missing}")
        if not 0 <= index < found.devices:
            raise ConfigError(f"device=cuda:{index}: there are {found.devices} GPUs, counted from 0")
        self.index = index
        self._proven = False
        """True once the driver has taken a batch of copies."""
        self._cupy: Any = import_module("cupy").cuda
        self.runtime = self._cupy.runtime
        self.thread = threading.local()
        self.library = LibCuda()
        self.batches = self.library.batches
        """True if the driver takes many copies in one call."""
        try:
            self._make_context()
        except (DriverError, AssertionError) as error:  # torch's messages have many lines
            raise DriverError(f"torch cannot use it: {str(error).splitlines()[0]}") from error
        self._kernel = self._load()

    @_on_device
    def _make_context(self) -> None:
        """Make the context, which torch and cupy share. A GPU that torch cannot use is refused here by torch, and so is
        any GPU after a fork."""
        torch.empty(1, device=f"cuda:{self.index}")

    @_on_device
    def _load(self) -> int:
        module = self._cupy.driver.moduleLoadData(kernels.image_for(self.identity().capability))
        return int(self._cupy.driver.moduleGetFunction(module, kernels.NAME))

    @_on_device
    def identity(self) -> DeviceIdentity:
        """Return which device this is."""
        properties = self.runtime.getDeviceProperties(self.index)
        registers = self.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        return DeviceIdentity(
            properties["name"].decode(), (properties["major"], properties["minor"]), properties["totalGlobalMem"],
            self.runtime.deviceGetPCIBusId(self.index), self.runtime.driverGetVersion(), self.batches,
            bool(self.runtime.deviceGetAttribute(registers, self.index)),
        )  # fmt: skip

    def use_device(self) -> None:
        """Make this device the current one of the calling thread. Only for threads that belong to the device."""
        with _translated():
            self.runtime.setDevice(self.index)
        self.library.relax_thread()

    @_on_device
    def free_memory(self) -> int:
        """Return how many bytes of device memory can be had."""
        return int(self.runtime.memGetInfo()[0])

    @_on_device
    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Return uint8 memory on the device, which is zeroed when the call returns."""
        tensor = torch.zeros(shape, dtype=torch.uint8, device=f"cuda:{self.index}")
        torch.cuda.current_stream().synchronize()
        return tensor

    # Memory by raw calls: cupy's own pinned memory is allocated by the driver, which takes three times as long.

    @_on_device
    def host_register(self, address: int, size: int) -> None:
        """Pin host memory and map it for the device, at the same address."""
        self.runtime.hostRegister(address, size, _PORTABLE_AND_MAPPED)

    @_on_device
    def host_unregister(self, address: int) -> None:
        """Undo ``host_register``."""
        self.runtime.hostUnregister(address)

    @_on_device
    def host_alloc(self, size: int) -> int:
        """Return the address of new host memory that is pinned and mapped for the device at the same address."""
        return int(self.runtime.hostAlloc(size, _PORTABLE_AND_MAPPED))

    @_on_device
    def host_free(self, address: int) -> None:
        """Undo ``host_alloc``."""
        self.runtime.freeHost(address)

    @_on_device
    def stream_create(self) -> StreamHandle:
        """Return a new stream, which does not wait for the default stream. Its kernels get the next multiprocessors
        that come free."""
        return self._cupy.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)

    def stream_from(self, pointer: int) -> StreamHandle:
        """Return the handle of an engine's stream, which is never destroyed here. ``pointer``: its ``cudaStream_t``."""
        return self._cupy.Stream.from_external(_Foreign(pointer))

    def event_from(self, pointer: int) -> EventHandle:
        """Return the handle of an engine's event, which is never destroyed here. ``pointer``: its ``cudaEvent_t``."""
        return _Foreign(pointer)

    @_on_device
    def stream_destroy(self, stream: StreamHandle) -> None:
        """Give a stream back. Nothing is in it any more."""
        # By a raw call, since an error in the object's __del__ would only be printed.
        pointer, stream.ptr = stream.ptr, 0
        self.runtime.streamDestroy(pointer)

    @_on_device
    def stream_synchronize(self, stream: StreamHandle) -> None:
        """Sleep or spin until all work that ``stream`` was given so far has happened."""
        stream.synchronize()

    @_on_device
    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        """Have later work of ``stream`` wait for the work that ``event`` stands for now. A later recording of ``event``
        does not count."""
        stream.wait_event(event)

    @_on_device
    def is_captured(self, stream: StreamHandle) -> bool:
        """Return True if work given to ``stream`` is captured into a graph instead of being done."""
        return bool(stream.is_capturing())

    @_on_device
    def captures_here(self) -> bool:
        """Return True if the calling thread captures a graph in the stream that is torch's current one."""
        return bool(torch.cuda.is_current_stream_capturing())

    @_on_device
    def event_create(self) -> EventHandle:
        """Return a new event without timing, for which ``event_synchronize`` sleeps."""
        return self._cupy.Event(block=True, disable_timing=True)  # ``block``: a thread that waits for it sleeps

    @_on_device
    def event_destroy(self, event: EventHandle) -> None:
        pointer, event.ptr = event.ptr, 0
        self.runtime.eventDestroy(pointer)

    @_on_device
    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        """Record ``event`` behind all work that ``stream`` was given so far."""
        event.record(stream)

    @_on_device
    def event_query(self, event: EventHandle) -> bool:
        """Return True if ``event`` has happened. If it was recorded in a capture, that graph is lost.

        Raises:
            DriverError: the event's work failed, or is in a graph: that is not the same as "not yet".
        """
        return self.library.event_query(event.ptr)  # cupy's ``event.done`` takes every error for "not yet"

    @_on_device
    def event_synchronize(self, event: EventHandle) -> None:
        """Sleep until ``event`` has happened."""
        event.synchronize()

    @_on_device
    def copy(self, stream: StreamHandle, towards: CopyDirection, spans: Spans) -> int:
        """Enqueue copies of runs, which read their sources in the order of the stream. Return how many entries of the
        driver's queue they take."""
        flags = 0 if towards is CopyDirection.WITHIN else OVERLAP_WITH_COMPUTE
        if self.batches and len(spans.size) > 1:
            try:
                self.library.copy_batch(stream.ptr, spans, flags)
                self._proven = True
                return -(-len(spans.size) // _BATCHED_PER_ENTRY)
            except DriverError as error:
                if self._proven or error.sticky:
                    raise
                self.batches = False  # one that refuses the first batch is not asked for another: singles are as good
        copy, kind = self.runtime.memcpyAsync, _KIND[towards]
        for dst, src, size in zip(*(array.tolist() for array in spans), strict=True):
            copy(dst, src, size, kind, stream.ptr)
        return len(spans.size)

    @_on_device
    def launch(self, stream: StreamHandle, table: Table, blocks: int) -> int:
        """Enqueue the copy kernel. ``table`` has been read when the call returns. Return how many entries of the
        driver's queue the launch takes."""
        places = np.array([table.ctypes.data], np.uint64)
        self._cupy.driver.launchKernel(
            self._kernel, blocks, 1, 1, kernels.THREADS, 1, 1, 0, stream.ptr, places.ctypes.data, 0
        )
        return _ENTRIES_OF_A_LAUNCH
