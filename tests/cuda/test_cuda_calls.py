"""The real driver's calls of cupy: flags, the order of arguments, the geometry of a launch.

``FakeCupy`` takes the place of cupy and writes down every call with its arguments, in the order of cupy's signatures;
an error in these calls would only show on a GPU, and some only as a wrong byte or a wait that spins.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.errors import ConfigError
from asynccache.memory.cuda import cupy_driver, kernels
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.device import open_device
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.device import CopyDirection

STREAM, EVENT = 0x77, 0x88
Call = tuple[Any, ...]


class FakeCudaError(RuntimeError):
    """As cupy's: all of them are RuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__("cudaErrorInvalidValue: invalid argument")
        self.status = status


class Recorder:
    """A module of functions that write down what they are called with."""

    def __init__(self, **results: Any) -> None:
        self.calls: list[Call] = []
        self.results: dict[str, Any] = results
        self.refuses: str | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            if name == self.refuses:
                raise FakeCudaError(1)
            return self.results.get(name)

        return call


class FakeRuntime(Recorder):
    cudaDevAttrCanUseHostPointerForRegisteredMem = 91


class FakeModules(Recorder):
    """cupy's ``driver``. Parameters of a launch are read at once, as the real one does."""

    def launchKernel(self, *arguments: int) -> None:
        place = ctypes.c_size_t.from_address(arguments[9]).value
        self.calls.append(("parameters", ctypes.string_at(place, kernels.TABLE.itemsize)))
        self.calls.append(("launchKernel", *arguments))


class FakeNvrtc(Recorder):
    class NVRTCError(RuntimeError):
        pass


class FakeStream:
    """cupy's ``Stream``: what it asks of the runtime, and of the events that it is given."""

    def __init__(self, runtime: FakeRuntime, ptr: int) -> None:
        self.runtime = runtime
        self.ptr = ptr

    def synchronize(self) -> None:
        self.runtime.streamSynchronize(self.ptr)

    def wait_event(self, event: Any) -> None:
        self.runtime.streamWaitEvent(self.ptr, event.ptr)

    def is_capturing(self) -> bool:
        found: bool = self.runtime.streamIsCapturing(self.ptr)
        return found


class FakeEvent:
    """cupy's ``Event``."""

    def __init__(self, runtime: FakeRuntime, ptr: int) -> None:
        self.runtime = runtime
        self.ptr = ptr

    def record(self, stream: FakeStream) -> None:
        self.runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self) -> None:
        self.runtime.eventSynchronize(self.ptr)


class FakeStreams:
    """cupy's class ``Stream``."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime

    def __call__(self, **settings: Any) -> FakeStream:
        return FakeStream(self.runtime, self.runtime.Stream(settings))

    def from_external(self, stream: Any) -> FakeStream:
        version, ptr = stream.__cuda_stream__()
        assert version == 0
        return FakeStream(self.runtime, ptr)


class FakeCupy:
    __version__ = "14.2.0"

    def __init__(self) -> None:
        properties = {"name": b"a GPU", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}
        self.runtime = FakeRuntime(
            driverGetVersion=13000, runtimeGetVersion=12090, getDeviceCount=2, deviceGetAttribute=1, getDevice=0,
            getDeviceProperties=properties, deviceGetPCIBusId="0000:1A:00.0", memGetInfo=(7, 80),
            Stream=STREAM, Event=EVENT, streamIsCapturing=True, hostAlloc=0x5000,
        )  # fmt: skip
        self.modules = FakeModules(moduleLoadData=0x10, moduleGetFunction=0x20)
        self.nvrtc = FakeNvrtc(getSupportedArchs=(75, 80, 90, 100, 120), createProgram=1, getCUBIN=b"machine code",
                               getPTX=b"ptx", getProgramLog="")  # fmt: skip

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(
            runtime=self.runtime, driver=self.modules, nvrtc=self.nvrtc, Stream=FakeStreams(self.runtime),
            Event=lambda **settings: FakeEvent(self.runtime, self.runtime.Event(settings)),
        )


class FakeLibCuda:
    batches = False

    def relax_thread(self) -> None: ...

    def relaxed(self) -> Any:
        return nullcontext()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    fake, empty = FakeCupy(), torch.empty
    for module in (cupy_driver, kernels):
        monkeypatch.setattr(module, "import_module", lambda name: fake)
    monkeypatch.setattr(cupy_driver, "LibCuda", FakeLibCuda)
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "empty", lambda *size, device="cpu", **rest: empty(*size, **rest))
    return fake


@pytest.fixture
def driver(cupy: FakeCupy) -> CupyDriver:
    found = CupyDriver(1)
    cupy.runtime.calls.clear()
    cupy.modules.calls.clear()
    return found


def seen(calls: list[Call]) -> list[Call]:
    """Without those that choose the thread's device."""
    return [call for call in calls if call[0] not in ("setDevice", "getDevice")]


# streams, events, memory


def test_each_call_has_its_arguments_in_order(driver: CupyDriver, cupy: FakeCupy) -> None:
    """Streams do not wait for the default stream, and their kernels come first, where multiprocessors are few; events
    sleep and keep no time; memory is pinned for every context and mapped; an engine's streams and events are used by
    their pointers."""
    event, stream = driver.event_create(), driver.stream_create()
    (made_event, (_, settings)) = seen(cupy.runtime.calls)
    assert made_event == ("Event", {"block": True, "disable_timing": True})
    assert settings.pop("priority") < -5
    assert settings == {"non_blocking": True}
    assert (event.ptr, stream.ptr) == (EVENT, STREAM)
    cupy.runtime.calls.clear()
    driver.event_record(event, stream)
    driver.stream_wait_event(stream, event)
    assert driver.is_captured(stream)
    driver.event_synchronize(event)
    driver.stream_synchronize(stream)
    default = driver.stream_from(0)                    # torch's
    driver.event_record(event, default)
    driver.stream_wait_event(default, driver.event_from(0x99))
    driver.event_destroy(event)
    driver.stream_destroy(stream)
    assert event.ptr == stream.ptr == 0, "so that they are not destroyed a second time when cupy's objects end"
    driver.host_register(0x1000, 4096)
    driver.host_unregister(0x1000)
    driver.host_free(driver.host_alloc(4096))
    assert driver.free_memory() == 7
    assert seen(cupy.runtime.calls) == [
        ("eventRecord", EVENT, STREAM), ("streamWaitEvent", STREAM, EVENT), ("streamIsCapturing", STREAM),
        ("eventSynchronize", EVENT), ("streamSynchronize", STREAM), ("eventRecord", EVENT, 0),
        ("streamWaitEvent", 0, 0x99), ("eventDestroy", EVENT), ("streamDestroy", STREAM),
        ("hostRegister", 0x1000, 4096, 0x01 | 0x02), ("hostUnregister", 0x1000),
        ("hostAlloc", 4096, 0x01 | 0x02), ("freeHost", 0x5000), ("memGetInfo",),
    ]  # fmt: skip
    driver.use_device()
    assert ("setDevice", 1) in cupy.runtime.calls


# copies


@pytest.mark.parametrize(
    ("towards", "kind"), [(CopyDirection.IN, 1), (CopyDirection.OUT, 2), (CopyDirection.WITHIN, 3)]
)
def test_copies_name_destination_source_size_kind_stream(
    driver: CupyDriver, cupy: FakeCupy, towards: CopyDirection, kind: int
) -> None:
    spans = Spans(*(np.array(n, np.uint64) for n in ([10, 11], [20, 21], [30, 31])))
    driver.copy(driver.stream_from(STREAM), towards, spans)
    assert seen(cupy.runtime.calls) == [
        ("memcpyAsync", 10, 20, 30, kind, STREAM), ("memcpyAsync", 11, 21, 31, kind, STREAM)
    ]  # fmt: skip


def test_a_launch_has_blocks_of_1024_threads_and_its_table_as_the_one_parameter(
    driver: CupyDriver, cupy: FakeCupy
) -> None:
    table = kernels.table(np.array([1 << 40], np.uint64), np.array([2 << 40], np.uint64), [3, 4], [5, 6], width=7 << 33,
                          dst_pitch=8, src_pitch=9)  # fmt: skip
    driver.launch(driver.stream_from(STREAM), table, 12)
    parameters, call = cupy.modules.calls
    assert parameters == ("parameters", table.tobytes())
    assert call[:10] == ("launchKernel", 0x20, 12, 1, 1, 1024, 1, 1, 0, STREAM)
    assert call[11:] == (0,)


def test_the_kernel_is_compiled_for_as_many_threads_as_it_gets_and_its_parameters_fit() -> None:
    assert "__launch_bounds__(1024)" in kernels.SOURCE
    assert kernels.THREADS == 1024
    assert kernels.TABLE.itemsize <= 4096


# opening


def test_the_kernel_is_loaded_by_its_name_as_machine_code_for_this_gpu(cupy: FakeCupy) -> None:
    CupyDriver(0)
    assert cupy.modules.calls == [("moduleLoadData", b"machine code"), ("moduleGetFunction", 0x10, kernels.NAME)]
    (options,) = [call[2] for call in cupy.nvrtc.calls if call[0] == "compileProgram"]
    assert "--gpu-architecture=sm_90" in options
    identity = CupyDriver(1).identity()
    assert identity[:4] == ("a GPU", (9, 0), 80 << 30, "0000:1A:00.0")
    assert (identity.driver, identity.batches) == (13000, False)


@pytest.mark.parametrize(("capability", "option"), [
    ((9, 0), "sm_90"), ((12, 0), "sm_120"), ((13, 5), "compute_120"), ((11, 0), "compute_100"), ((7, 0), "sm_70"),
])
def test_a_gpu_that_nvrtc_does_not_know_gets_the_newest_ptx_below_it(
    cupy: FakeCupy, capability: tuple[int, int], option: str
) -> None:
    """What is too old has no such PTX: NVRTC says so."""
    assert kernels.image_for(capability) == (b"ptx" if "compute" in option else b"machine code")
    (options,) = [call[2] for call in cupy.nvrtc.calls if call[0] == "compileProgram"]
    assert f"--gpu-architecture={option}" in options


def test_an_error_of_cupy_is_the_drivers(driver: CupyDriver, cupy: FakeCupy) -> None:
    event, stream = driver.event_create(), driver.stream_create()
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("Stream", driver.stream_create), ("Event", driver.event_create),
        ("memGetInfo", driver.free_memory), ("getDeviceProperties", driver.identity), ("setDevice", driver.use_device),
        ("hostRegister", lambda: driver.host_register(0, 1)),
        ("eventRecord", lambda: driver.event_record(event, stream)),
        ("memcpyAsync", lambda: driver.copy(stream, CopyDirection.IN, Spans(*np.ones((3, 1), np.uint64)))),
    ]  # fmt: skip
    for name, attempt in attempts:
        cupy.runtime.refuses = name
        with pytest.raises(DriverError, match="invalid argument"):
            attempt()


def refused(message: str) -> Callable[..., torch.Tensor]:
    def refuse(*size: int, **rest: Any) -> torch.Tensor:
        raise RuntimeError(message)

    return refuse


def test_what_torch_refuses_when_the_device_opens_is_one_sentence(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty", refused("Cannot re-initialize CUDA in forked subprocess.\nTo use CUDA with"))
    with pytest.raises(ConfigError) as told:
        open_device("cuda:0")
    assert str(told.value) == (
        "device=cuda:0: torch cannot use it: Cannot re-initialize CUDA in forked subprocess."
    )  # fmt: skip


def test_memory_that_torch_does_not_have_is_an_error_of_the_driver(
    driver: CupyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "zeros", refused("CUDA out of memory."))
    with pytest.raises(DriverError, match="out of memory"):
        driver.device_tensor((1,))


def test_a_driver_that_is_too_old_for_torch_is_missing_something(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).\nPlease", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    cupy.runtime.results["driverGetVersion"] = 11040
    missing = cupy_driver.find().missing
    assert missing == ("torch is built for CUDA 12.9 and cannot use a driver for CUDA 11.4: "
                       "The NVIDIA driver on your system is too old (found version 11040).")  # fmt: skip
    with pytest.raises(ConfigError, match=r"^device=cuda:1: torch is built for CUDA 12\.9"):
        open_device("cuda:1")


def test_a_machine_that_maps_pinned_memory_elsewhere_is_told_apart(driver: CupyDriver, cupy: FakeCupy) -> None:
    """WSL2 does."""
    assert driver.identity().registers
    cupy.runtime.results["deviceGetAttribute"] = 0
    assert not driver.identity().registers
    assert ("deviceGetAttribute", 91, 1) in cupy.runtime.calls


def test_a_gpu_that_is_not_there(cupy: FakeCupy) -> None:
    with pytest.raises(ConfigError, match="there are 2 GPUs, counted from 0"):
        open_device("cuda:2")


def test_nvrtc_that_is_not_installed_is_told(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError("libnvrtc.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(kernels, "import_module", absent)
    with pytest.raises(ConfigError, match=r"NVRTC is not installed: libnvrtc\.so\.12: cannot open shared object file$"):
        open_device("cuda:0")


def test_nvrtc_whose_library_is_missing_is_told_too(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy 14.2 says so by an error of its own, which is no ImportError, at the first call."""
    class DynamicLibNotFoundError(RuntimeError):
        pass

    def missing() -> Any:
        raise DynamicLibNotFoundError("libnvrtc.so.12 is not there")

    monkeypatch.setattr(cupy.nvrtc, "getSupportedArchs", missing, raising=False)
    with pytest.raises(kernels.NoCompiler, match="NVRTC is not installed: libnvrtc"):
        kernels.architectures()
    monkeypatch.setattr(cupy.nvrtc, "getSupportedArchs", refused("something else"), raising=False)
    with pytest.raises(RuntimeError, match="something else"):
        kernels.architectures()
