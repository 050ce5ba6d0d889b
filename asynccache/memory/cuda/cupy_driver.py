"""The real driver: cupy's streams and events, its calls of the CUDA runtime, and those of ``libcuda``.

Without a GPU ``import cupy`` works, but every call of cupy raises. So ``find`` checks once what this machine lacks, and
says it in one sentence.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from asynccache.errors import ConfigError
from asynccache.extras import install
from asynccache.memory.cuda import kernels
from asynccache.memory.cuda.driver_protocol import DeviceIdentity, DriverError, EventHandle, Spans, StreamHandle, Table
from asynccache.memory.cuda.libcuda import OVERLAP_WITH_COMPUTE, LibCuda
from asynccache.memory.device import CopyDirection

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


class FoundCuda(NamedTuple):
    """The parts of CUDA that this machine has; None for a part that it has not. ``missing``: why there can be no CUDA
    device, in a sentence; "" if there can."""

    cupy: str | None
    torch_cuda: str | None
    devices: int
    driver: int | None
    missing: str
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


def _code(error: RuntimeError) -> int | None:
    """Return CUDA's number of an error of cupy (``status``) or of torch (``error_code``); None if it has none."""
    found = getattr(error, "status", getattr(error, "error_code", None))
    return found if isinstance(found, int) else None


def _translated(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Have ``call`` raise cupy's errors (all are RuntimeError) as ``DriverError``."""

    @wraps(call)
    def translated(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise DriverError(str(error), _code(error)) from error

    return translated


def _on_device(call: Callable[Concatenate[CupyDriver, _P], _T]) -> Callable[Concatenate[CupyDriver, _P], _T]:
    """Wrap ``call``, which works on the thread's current device, so that it works on the driver's device. The call may
    come from a thread whose current device is another one. torch restores that device afterwards, without making a
    context where there is none.

    A thread that is on the device from its start may have no context all the same, and calls of the driver (not of the
    runtime) would be refused there. Setting the device once gives it one."""

    @_translated
    @wraps(call)
    def on_device(driver: CupyDriver, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        if driver.runtime.getDevice() == driver.index:
            if not getattr(driver.thread, "has_context", False):
                driver.runtime.setDevice(driver.index)
                driver.thread.has_context = True
            return call(driver, *args, **kwargs)
        with torch.cuda.device(driver.index):
            driver.runtime.setDevice(driver.index)
            return call(driver, *args, **kwargs)

    return on_device


def _outside_graphs(call: Callable[Concatenate[CupyDriver, _P], _T]) -> Callable[Concatenate[CupyDriver, _P], _T]:
    """Wrap ``call``, which CUDA refuses while any thread captures a graph, and which would spoil that graph. For calls
    that come from threads that are not the device's own."""

    @_on_device
    @wraps(call)
    def outside_graphs(driver: CupyDriver, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with driver.library.relaxed():
            return call(driver, *args, **kwargs)

    return outside_graphs


class _Foreign(NamedTuple):
    """A stream or an event of an engine's, by its pointer: what cupy's methods ask of such an object."""

    ptr: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


class CupyDriver:
    """The driver for one device. ``index`` is CUDA's number of it; ``runtime`` is cupy's. ``_proven``: True once a
    batch of copies was tried."""

    def __init__(self, index: int) -> None:
        found = find()
        if found.missing:
            raise ConfigError(f"device=cuda:{index}: {found.missing}")
        if not 0 <= index < found.devices:
            raise ConfigError(f"device=cuda:{index}: there are {found.devices} GPUs, counted from 0")
        self.index = index
        self._proven = False
        self._cupy: Any = import_module("cupy").cuda
        self.runtime = self._cupy.runtime
        self.thread = threading.local()
        self.library = LibCuda()
        self.batches = self.library.batches
        try:
            self._make_context()
        except (DriverError, AssertionError) as error:  # torch's messages have many lines
            raise DriverError(f"torch cannot use it: {str(error).splitlines()[0]}") from error
        self._kernel = self._load()

    @_outside_graphs
    def _make_context(self) -> None:
        """Make the context, which torch and cupy share. A GPU that torch cannot use is refused here by torch, and so is
        any GPU after a fork."""
        torch.empty(1, device=f"cuda:{self.index}")

    @_outside_graphs
    def _load(self) -> int:
        module = self._cupy.driver.moduleLoadData(kernels.image_for(self.identity().capability))
        kernel: int = self._cupy.driver.moduleGetFunction(module, kernels.NAME)
        return kernel

    @_translated
    def identity(self) -> DeviceIdentity:
        properties = self.runtime.getDeviceProperties(self.index)
        registers = self.runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        return DeviceIdentity(
            properties["name"].decode(), (properties["major"], properties["minor"]), properties["totalGlobalMem"],
            self.runtime.deviceGetPCIBusId(self.index), self.runtime.driverGetVersion(), self.batches,
            bool(self.runtime.deviceGetAttribute(registers, self.index)),
        )  # fmt: skip

    @_translated
    def use_device(self) -> None:
        self.runtime.setDevice(self.index)
        self.library.relax_thread()

    @_outside_graphs
    def free_memory(self) -> int:
        free: int = self.runtime.memGetInfo()[0]
        return free

    @_outside_graphs
    def device_tensor(self, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.zeros(shape, dtype=torch.uint8, device=f"cuda:{self.index}")
        torch.cuda.current_stream().synchronize()
        return tensor

    # Memory by raw calls: cupy's own pinned memory is allocated by the driver, which takes three times as long.

    @_outside_graphs
    def host_register(self, address: int, size: int) -> None:
        self.runtime.hostRegister(address, size, _PORTABLE_AND_MAPPED)

    @_outside_graphs
    def host_unregister(self, address: int) -> None:
        self.runtime.hostUnregister(address)

    @_outside_graphs
    def host_alloc(self, size: int) -> int:
        address: int = self.runtime.hostAlloc(size, _PORTABLE_AND_MAPPED)
        return address

    @_outside_graphs
    def host_free(self, address: int) -> None:
        self.runtime.freeHost(address)

    @_outside_graphs
    def stream_create(self) -> StreamHandle:
        return self._cupy.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY)

    def stream_from(self, pointer: int) -> StreamHandle:
        return self._cupy.Stream.from_external(_Foreign(pointer))

    def event_from(self, pointer: int) -> EventHandle:
        return _Foreign(pointer)

    @_on_device
    def stream_destroy(self, stream: StreamHandle) -> None:
        # By a raw call, since an error in the object's __del__ would only be printed.
        pointer, stream.ptr = stream.ptr, 0
        self.runtime.streamDestroy(pointer)

    @_on_device
    def stream_synchronize(self, stream: StreamHandle) -> None:
        stream.synchronize()

    @_on_device
    def stream_wait_event(self, stream: StreamHandle, event: EventHandle) -> None:
        stream.wait_event(event)

    @_on_device
    def is_captured(self, stream: StreamHandle) -> bool:
        return bool(stream.is_capturing())

    @_on_device
    def captures_here(self) -> bool:
        return bool(torch.cuda.is_current_stream_capturing())

    @_on_device
    def event_create(self) -> EventHandle:
        return self._cupy.Event(block=True, disable_timing=True)  # ``block``: a thread that waits for it sleeps

    @_on_device
    def event_destroy(self, event: EventHandle) -> None:
        pointer, event.ptr = event.ptr, 0
        self.runtime.eventDestroy(pointer)

    @_on_device
    def event_record(self, event: EventHandle, stream: StreamHandle) -> None:
        event.record(stream)

    @_on_device
    def event_query(self, event: EventHandle) -> bool:
        return self.library.event_query(event.ptr)  # cupy's ``event.done`` takes every error for "not yet"

    @_on_device
    def event_synchronize(self, event: EventHandle) -> None:
        event.synchronize()

    @_on_device
    def copy(self, stream: StreamHandle, towards: CopyDirection, spans: Spans) -> int:
        flags = 0 if towards is CopyDirection.WITHIN else OVERLAP_WITH_COMPUTE
        if len(spans.size) > 1 and self._batched(stream.ptr, spans, flags):
            return -(-len(spans.size) // _BATCHED_PER_ENTRY)
        copy, kind = self.runtime.memcpyAsync, _KIND[towards]
        for dst, src, size in zip(*(array.tolist() for array in spans), strict=True):
            copy(dst, src, size, kind, stream.ptr)
        return len(spans.size)

    def _batched(self, stream: int, spans: Spans, flags: int) -> bool:
        """Enqueue the copies as one batch, and return True; return False if they must go one by one, which is as good.
        A driver that refuses the first batch is not asked for another."""
        if not self.batches:
            return False
        try:
            self.library.copy_batch(stream, spans, flags)
        except DriverError as error:
            if self._proven or error.sticky:
                raise
            self.batches = False
        self._proven = True
        return self.batches

    @_on_device
    def launch(self, stream: StreamHandle, table: Table, blocks: int) -> int:
        """Enqueue the copy kernel. The driver copies the parameters before it returns."""
        places = np.array([table.ctypes.data], np.uint64)
        self._cupy.driver.launchKernel(
            self._kernel, blocks, 1, 1, kernels.THREADS, 1, 1, 0, stream.ptr, places.ctypes.data, 0
        )
        return _ENTRIES_OF_A_LAUNCH
