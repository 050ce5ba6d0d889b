"""The real driver, as far as it can be tested without a GPU: its calls of cupy (flags, the order of arguments, the
geometry of a launch) and of the library, and its messages on a machine that has no GPU.

``FakeCupy`` takes the place of cupy and writes down every call with its arguments, in the order of cupy's signatures;
an error in these calls would only show on a GPU, and some only as a wrong byte or a wait that spins.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.errors import ConfigError
from asynccache.memory.cuda import cupy_driver, kernels, libcuda
from asynccache.memory.cuda.cupy_driver import CupyDriver
from asynccache.memory.cuda.device import open_device
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.cuda.streams import stream_pointer
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


# The calls of the library, and what a machine without a GPU is told.


A_STREAM = SimpleNamespace(ptr=0x77)
ROOT = FilePath(__file__).parents[2]
WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_without_a_gpu_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^device=cuda:0: .*(cupy is not installed|no NVIDIA driver|sees no GPU)"):
        open_device("cuda:0")


def test_the_device_is_there_without_cupy() -> None:
    code = ("import sys, asynccache.memory.cuda.device, asynccache.memory.cuda.cupy_driver, asynccache.runtime.cache\n"
            "sys.exit('cupy' in sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


class InstalledCupy:
    __version__ = "14"

    class cuda:
        class runtime:
            version = 13000
            devices = 1

            @classmethod
            def driverGetVersion(cls) -> int:
                return cls.version

            @classmethod
            def getDeviceCount(cls) -> int:
                if not cls.devices:
                    raise RuntimeError("cudaErrorNoDevice")
                return cls.devices


@pytest.mark.parametrize(("version", "devices", "torch_cuda", "says"), [
    (0, 0, "13.0", "no NVIDIA driver"), (13000, 0, "13.0", "sees no GPU"), (13000, 1, None, "torch is for the CPU"),
    (13000, 1, "13.0", None),
])
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, version: int, devices: int, torch_cuda: str | None, says: str | None
) -> None:
    monkeypatch.setattr(InstalledCupy.cuda.runtime, "version", version)
    monkeypatch.setattr(InstalledCupy.cuda.runtime, "devices", devices)
    monkeypatch.setattr(cupy_driver, "import_module", lambda name: InstalledCupy)
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = cupy_driver.find()
    assert found.missing == "" if says is None else says in found.missing


BROKEN = {
    "an empty folder": (None, "is not cupy"),
    "a module without a runtime": ("__version__ = '14'\nclass cuda: pass\n", "is not cupy"),
    "a module without a version": ("class cuda:\n    class runtime: pass\n", "is not cupy"),
    "a module that is not installed whole": ("import no_such_library_of_cuda\n", "cupy is not installed"),
    "a module that does not import": ("raise OSError('libcudart.so.12: bad ELF')\n", "bad ELF"),
    "a module with a syntax error": ("def\n", "does not import"),
    "a runtime without functions": ("__version__ = '14'\nclass cuda:\n    class runtime: pass\n", "no NVIDIA driver"),
    "a runtime that answers nonsense": (
        "__version__ = '14'\nclass cuda:\n    class runtime:\n        driverGetVersion = str\n", "no NVIDIA driver"
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_whatever_is_called_cupy_on_the_path_is_a_sentence_and_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath, what: str
) -> None:
    source, says = BROKEN[what]
    package = tmp_path / "cupy"
    package.mkdir()
    if source is not None:
        (package / "__init__.py").write_text(source)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # alone: a folder gives way to what is installed
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    try:
        missing = cupy_driver.find().missing
        with pytest.raises(ConfigError, match=r"^device=cuda:0: "):
            open_device("cuda:0")
    finally:
        sys.modules.pop("cupy", None)
    assert says in missing
    if says == "is not cupy":
        assert str(package) in missing


# libcuda, on a library of our own


class FakeLibrary:
    """Takes the place of libcuda: ctypes functions, so that the ABI is what is tested."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.seen: dict[str, Any] = {}
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_size_t, *(ctypes.c_void_p,) * 2,
                                ctypes.c_size_t, *(ctypes.c_void_p,) * 2)  # fmt: skip
        self.function = kind(self.batch)
        self.cuEventQuery = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.query)
        self.cuGetErrorString = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)(self.text)
        self.cuGetProcAddress_v2 = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p
        )(self.find)  # fmt: skip
        self.modes: list[int] = []
        self.mode = 0
        self.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.exchange)

    def find(self, name: bytes, found: int, version: int, flags: int, status: int) -> int:
        self.seen["asked"] = (name, version, flags)
        ctypes.c_void_p.from_address(found).value = ctypes.cast(self.function, ctypes.c_void_p).value
        return 0

    def batch(self, dst: int, src: int, size: int, count: int, attributes: int, indices: int, kinds: int,
              failed: int, stream: int) -> int:  # fmt: skip
        words = [list((ctypes.c_uint64 * count).from_address(a)) for a in (dst, src, size)]
        self.seen |= {"words": words, "kinds": kinds, "stream": stream,
                      "attributes": list((ctypes.c_uint * 6).from_address(attributes)),
                      "indices": ctypes.c_size_t.from_address(indices).value}  # fmt: skip
        ctypes.c_size_t.from_address(failed).value = 2
        return self.answer

    def exchange(self, mode: int) -> int:
        given = ctypes.c_int.from_address(mode)
        self.modes.append(given.value)
        self.mode, given.value = given.value, self.mode
        return 0

    def query(self, event: int) -> int:
        return {8: 0, 16: 600}.get(event, 700)

    def text(self, code: int, found: int) -> int:
        ctypes.c_char_p.from_address(found).value = b"an illegal memory access was encountered"
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: fake)
    return fake


def spans(count: int) -> Spans:
    return Spans(*(np.arange(count, dtype=np.uint64) + base for base in (1 << 40, 2 << 40, 1)))


def test_many_copies_are_one_call_with_sources_read_in_the_streams_order(library: FakeLibrary) -> None:
    cuda = libcuda.LibCuda()
    assert cuda.batches
    assert library.seen["asked"] == (b"cuMemcpyBatchAsync", 12080, 0)
    cuda.copy_batch(0x77, spans(3), libcuda.OVERLAP_WITH_COMPUTE)
    assert library.seen["words"] == [[(1 << 40) + i for i in range(3)], [(2 << 40) + i for i in range(3)], [1, 2, 3]]
    assert library.seen["attributes"] == [1, 0, 0, 0, 0, 1]
    assert (library.seen["kinds"], library.seen["indices"], library.seen["stream"]) == (1, 0, 0x77)
    assert ctypes.sizeof(libcuda._Attributes) == 24


def test_a_batch_that_is_refused_says_where(library: FakeLibrary) -> None:
    library.answer = 1
    with pytest.raises(DriverError, match=r"illegal memory access .*\(1\) at copy 2 of 3") as told:
        libcuda.LibCuda().copy_batch(0x77, spans(3), 0)
    assert (told.value.code, told.value.sticky) == (1, False)


def test_an_event_that_failed_is_neither_done_nor_pending(library: FakeLibrary) -> None:
    cuda = libcuda.LibCuda()
    assert cuda.event_query(8) is True
    assert cuda.event_query(16) is False
    with pytest.raises(DriverError, match=r"illegal memory access .*\(700\)") as told:
        cuda.event_query(24)
    assert (told.value.code, told.value.sticky) == (700, True)


def test_a_thread_that_is_relaxed_for_good_is_not_asked_again(library: FakeLibrary) -> None:
    """Each of these calls may cost 5 ms beside a thread that computes in Python."""
    cuda = libcuda.LibCuda()

    def ask() -> None:
        with cuda.relaxed():
            pass

    cuda.relax_thread()
    assert library.modes == [2]
    ask()
    assert library.modes == [2]
    library.mode = 0  # of a thread
    other = threading.Thread(target=ask)
    other.start()
    other.join()
    assert library.modes == [2, 2, 0]


def test_a_driver_that_is_too_old_takes_no_batches(library: FakeLibrary) -> None:
    def find(name: bytes, found: int, version: int, flags: int, status: int) -> int:
        return 500

    library.cuGetProcAddress_v2 = type(library.cuGetProcAddress_v2)(find)
    assert not libcuda.LibCuda().batches


class Runtime:
    """The part of cupy's runtime that copies."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, ...]] = []

    def getDevice(self) -> int:
        return 0

    def memcpyAsync(self, *arguments: int) -> None:
        self.copies.append(arguments)


def driver_on(library: FakeLibrary) -> tuple[cupy_driver.CupyDriver, Runtime]:
    driver: Any = cupy_driver.CupyDriver.__new__(cupy_driver.CupyDriver)
    driver.index, driver.library, driver.runtime = 0, libcuda.LibCuda(), Runtime()
    driver.thread = SimpleNamespace(has_context=True)
    driver.library.relax_thread()
    driver.batches, driver._proven = True, False
    return driver, driver.runtime


def test_a_driver_that_refuses_its_first_batch_copies_one_by_one_from_then_on(library: FakeLibrary) -> None:
    driver, runtime = driver_on(library)
    library.answer = 1
    assert driver.copy(A_STREAM, CopyDirection.OUT, spans(3)) == 3  # entries of the driver's queue
    assert driver.copy(A_STREAM, CopyDirection.IN, spans(2)) == 2
    assert [c[2:] for c in runtime.copies] == [(1, 2, 0x77), (2, 2, 0x77), (3, 2, 0x77), (1, 1, 0x77), (2, 1, 0x77)]


def test_a_driver_that_took_a_batch_once_fails_a_later_one(library: FakeLibrary) -> None:
    driver, runtime = driver_on(library)
    assert driver.copy(A_STREAM, CopyDirection.OUT, spans(9)) == 2
    assert runtime.copies == []
    library.answer = 1
    with pytest.raises(DriverError):
        driver.copy(A_STREAM, CopyDirection.OUT, spans(3))


def test_a_device_that_has_failed_is_not_a_driver_without_batches(library: FakeLibrary) -> None:
    driver, runtime = driver_on(library)
    library.answer = 719
    with pytest.raises(DriverError, match="719"):
        driver.copy(A_STREAM, CopyDirection.OUT, spans(3))
    assert runtime.copies == []


# the current device


class TwoGpus:
    """The runtime of threads that begin on device 0, without a context. It writes down on which device each call came.
    Only ``setDevice`` gives a thread a context; a call of the driver (not of the runtime) needs one."""

    def __init__(self) -> None:
        self.here = threading.local()
        self.seen: dict[str, int] = {}

    @property
    def current(self) -> int:
        return getattr(self.here, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self.here.index = index

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, index: int) -> None:
        self.current = self.here.context = index

    def moduleLoadData(self, image: bytes) -> int:
        if getattr(self.here, "context", None) != self.current:
            error = RuntimeError("CUDA_ERROR_INVALID_CONTEXT: invalid device context")
            error.status = 201  # type: ignore[attr-defined]
            raise error
        self.seen["moduleLoadData"] = self.current
        return 16

    def deviceGetAttribute(self, attribute: int, index: int) -> int:
        return 1

    def deviceGetPCIBusId(self, index: int) -> str:
        return "0000:00:00.0"

    def driverGetVersion(self) -> int:
        return 13000

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"a GPU", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}

    def memGetInfo(self) -> tuple[int, int]:
        self.seen["memGetInfo"] = self.current
        return 7, 80

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            self.seen[name] = self.current
            return 16

        return call

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """As ``torch.cuda.device``."""
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def gpus(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> TwoGpus:
    two = TwoGpus()
    found = cupy_driver.FoundCuda("14", "13.0", 2, 13000, "")
    monkeypatch.setattr(cupy_driver, "find", lambda: found)
    def stream(**settings: object) -> Any:
        return FakeStream(two, two.streamCreate())  # type: ignore[arg-type]

    def event(**settings: object) -> Any:
        return FakeEvent(two, two.eventCreate())  # type: ignore[arg-type]

    modules = SimpleNamespace(cuda=SimpleNamespace(runtime=two, driver=two, Stream=stream, Event=event))
    monkeypatch.setattr(cupy_driver, "import_module", lambda name: modules)
    monkeypatch.setattr(kernels, "image_for", lambda capability: b"")
    monkeypatch.setattr(torch, "empty", lambda *size, **options: None)
    monkeypatch.setattr(torch.cuda, "device", two.device)
    return two


def test_what_means_the_current_device_means_this_one_and_leaves_the_callers_alone(gpus: TwoGpus) -> None:
    driver = cupy_driver.CupyDriver(1)
    assert gpus.current == 0
    event, stream = driver.event_create(), driver.stream_create()
    driver.event_record(event, stream)
    driver.stream_wait_event(stream, event)
    driver.host_register(1 << 20, 4096)
    driver.host_unregister(1 << 20)
    driver.free_memory()
    driver.event_query(driver.event_from(16))
    driver.event_destroy(event)
    driver.stream_destroy(stream)
    asked = ("moduleLoadData", "moduleGetFunction", "streamCreate", "eventCreate", "eventRecord",
             "streamWaitEvent", "hostRegister", "hostUnregister", "memGetInfo", "eventDestroy",
             "streamDestroy")  # fmt: skip
    assert {name: gpus.seen[name] for name in asked} == dict.fromkeys(asked, 1)
    assert gpus.current == 0
    driver.use_device()
    assert gpus.current == 1


def test_threads_of_the_device_do_not_spoil_a_graph_that_another_captures(
    gpus: TwoGpus, library: FakeLibrary
) -> None:
    driver = cupy_driver.CupyDriver(1)
    assert driver.library._thread.__dict__ == {}, "the caller's thread is left as it is"
    library.modes.clear()
    driver.use_device()
    assert library.modes == [2]


CALLS: dict[str, Callable[[cupy_driver.CupyDriver], object]] = {
    "host_register": lambda driver: driver.host_register(1 << 20, 4096),
    "host_unregister": lambda driver: driver.host_unregister(1 << 20),
    "host_alloc": lambda driver: driver.host_alloc(4096), "host_free": lambda driver: driver.host_free(1 << 20),
    "free_memory": lambda driver: driver.free_memory(), "stream_create": lambda driver: driver.stream_create(),
    "opening": lambda driver: cupy_driver.CupyDriver(1),
    "event_create": lambda driver: driver.event_create(),
    "event_record": lambda driver: driver.event_record(driver.event_create(), driver.stream_create()),
    "stream_wait_event": lambda driver: driver.stream_wait_event(driver.stream_create(), driver.event_from(8)),
    "event_query, happened": lambda driver: driver.event_query(driver.event_from(8)),
    "event_query, not yet": lambda driver: driver.event_query(driver.event_from(16)),
    "event_query, failed": lambda driver: driver.event_query(driver.event_from(24)),
}  # fmt: skip
CALLED = ("hostRegister", "hostUnregister", "hostAlloc", "freeHost", "memGetInfo", "streamCreate", "moduleLoadData",
          "eventCreate", "eventRecord", "streamWaitEvent")  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_no_call_in_anybodys_thread_spoils_a_graph(gpus: TwoGpus, library: FakeLibrary, what: str) -> None:
    """torch captures in the mode in which calls of other threads are refused, and end the capture."""
    driver = cupy_driver.CupyDriver(1)
    library.mode, seen, ask = 0, list[int](), library.cuEventQuery
    for name in CALLED:
        def noted(*arguments: object, name: str = name) -> Any:
            seen.append(library.mode)
            return (7, 80) if name == "memGetInfo" else 16

        setattr(gpus, name, noted)

    def asked(event: int) -> int:
        seen.append(library.mode)
        answer: int = ask(event)
        return answer

    driver.library._library = SimpleNamespace(cuEventQuery=asked)  # type: ignore[assignment]
    with suppress(DriverError):  # the event of one
        CALLS[what](driver)
    assert seen == [2] * len(seen) != []
    assert library.mode == 0, "and the thread is as it was, whatever the answer"


def test_a_device_opens_in_a_thread_that_has_no_context(gpus: TwoGpus) -> None:
    """An engine's thread of execution has one; a fresh thread has none, also where it is on the right device already,
    and torch, which has memory at hand, asks CUDA for nothing."""
    opened: list[cupy_driver.CupyDriver] = []
    for index in (0, 1):
        thread = threading.Thread(target=lambda index=index: opened.append(cupy_driver.CupyDriver(index)))
        thread.start()
        thread.join()
    assert [driver.index for driver in opened] == [0, 1]


def test_a_call_that_is_refused_leaves_the_callers_device_alone_too(
    gpus: TwoGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(RuntimeError):
        status = 2

    def create(flags: int) -> int:
        raise Refused("out of memory")

    driver = cupy_driver.CupyDriver(1)
    monkeypatch.setattr(gpus, "streamCreate", lambda: create(0), raising=False)
    with pytest.raises(DriverError, match="out of memory") as told:
        driver.stream_create()
    assert (told.value.code, told.value.sticky) == (2, False)
    assert gpus.current == 0


# streams of engines


class Torch:
    cuda_stream = 0x10


class Cupy:
    ptr = 0x20


class Speaks:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 0x30


class SpeakssByProperty:
    __cuda_stream__ = (0, 0x40)


def test_streams_of_torch_cupy_and_the_protocol() -> None:
    assert [stream_pointer(s) for s in (Torch(), Cupy(), Speaks(), SpeakssByProperty(), 0x50)] == [16, 32, 48, 64, 80]
    with pytest.raises(ConfigError, match="no CUDA stream"):
        stream_pointer(object())
