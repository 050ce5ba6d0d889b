"""The real driver, as far as it can be tested without a GPU: its calls of cupy (flags, the order of arguments, the
geometry of a launch) and of the library, and its messages on a machine that has no GPU.

``FakeCuda`` and ``FakeLibrary`` take the place of cupy and of libcuda and write down every call with its arguments, in
the order of cupy's signatures; an error in these calls would only show on a GPU, and some only as a wrong byte or a
wait that spins.
"""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

    def __init__(self, says: str, status: int) -> None:
        super().__init__(says)
        self.status = status


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
        self.seen.setdefault("queries", []).append(self.mode)
        return {8: 0, 16: 600}.get(event, 700)

    def text(self, code: int, found: int) -> int:
        ctypes.c_char_p.from_address(found).value = b"an illegal memory access was encountered"
        return 0


class FakeCuda:
    """cupy's ``runtime``, ``driver`` and ``nvrtc``. All that is called is written down with its arguments, and beside
    that on which device of the thread it came, and in which mode of capture.

    Threads begin on device 0, without a context. Only ``setDevice`` gives a thread a context; a call of the driver (not
    of the runtime) needs one."""

    cudaDevAttrCanUseHostPointerForRegisteredMem = 91
    NVRTCError = FakeCudaError

    def __init__(self, library: FakeLibrary) -> None:
        self.library = library
        self.calls: list[Call] = []
        self.under: dict[str, tuple[int, int]] = {}
        self.refuses: str | None = None
        self.here = threading.local()
        properties = {"name": b"a GPU", "major": 9, "minor": 0, "totalGlobalMem": 80 << 30}
        self.results: dict[str, Any] = {
            "driverGetVersion": 13000, "runtimeGetVersion": 12090, "getDeviceCount": 2, "deviceGetAttribute": 1,
            "getDeviceProperties": properties, "deviceGetPCIBusId": "0000:1A:00.0", "memGetInfo": (7, 80),
            "Stream": STREAM, "Event": EVENT, "streamIsCapturing": True, "hostAlloc": 0x5000, "moduleLoadData": 0x10,
            "moduleGetFunction": 0x20, "getSupportedArchs": (75, 80, 90, 100, 120), "createProgram": 1,
            "getCUBIN": b"machine code", "getPTX": b"ptx", "getProgramLog": "",
        }  # fmt: skip

    @property
    def current(self) -> int:
        return getattr(self.here, "index", 0)

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, index: int) -> None:
        self._refuse("setDevice")
        self.here.index = self.here.context = index

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        """As ``torch.cuda.device``."""
        before, self.here.index = self.current, index
        try:
            yield
        finally:
            self.here.index = before

    def launchKernel(self, *arguments: int) -> None:
        """Parameters are read at once, as the real one does."""
        place = ctypes.c_size_t.from_address(arguments[9]).value
        self.calls += [("parameters", ctypes.string_at(place, kernels.TABLE.itemsize)), ("launchKernel", *arguments)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, *arguments))
            self.under[name] = self.current, self.library.mode
            self._refuse(name)
            if name == "moduleLoadData" and getattr(self.here, "context", None) != self.current:
                raise FakeCudaError("CUDA_ERROR_INVALID_CONTEXT: invalid device context", 201)
            return self.results.get(name)

        return call

    def _refuse(self, name: str) -> None:
        if name == self.refuses:
            raise FakeCudaError("cudaErrorInvalidValue: invalid argument", 1)


class FakeStream:
    """cupy's ``Stream``: what it asks of the runtime, and of the events that it is given."""

    def __init__(self, runtime: FakeCuda, ptr: int) -> None:
        self.runtime = runtime
        self.ptr = ptr

    def synchronize(self) -> None:
        self.runtime.streamSynchronize(self.ptr)

    def wait_event(self, event: Any) -> None:
        self.runtime.streamWaitEvent(self.ptr, event.ptr)

    def is_capturing(self) -> bool:
        found: bool = self.runtime.streamIsCapturing(self.ptr)
        return found


class FakeStreams:
    """cupy's class ``Stream``."""

    def __init__(self, runtime: FakeCuda) -> None:
        self.runtime = runtime

    def __call__(self, **settings: Any) -> FakeStream:
        return FakeStream(self.runtime, self.runtime.Stream(settings))

    def from_external(self, stream: Any) -> FakeStream:
        version, ptr = stream.__cuda_stream__()
        assert version == 0
        return FakeStream(self.runtime, ptr)


class FakeEvent:
    """cupy's ``Event``."""

    def __init__(self, runtime: FakeCuda, settings: dict[str, Any]) -> None:
        self.runtime = runtime
        self.ptr = runtime.Event(settings)

    def record(self, stream: FakeStream) -> None:
        self.runtime.eventRecord(self.ptr, stream.ptr)

    def synchronize(self) -> None:
        self.runtime.eventSynchronize(self.ptr)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(ctypes, "PyDLL", lambda name: fake)
    return fake


@pytest.fixture
def gpus(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine with two of them, cupy and torch."""
    fake, empty = FakeCuda(library), torch.empty
    cuda = SimpleNamespace(runtime=fake, driver=fake, nvrtc=fake, Stream=FakeStreams(fake),
                           Event=lambda **settings: FakeEvent(fake, settings))  # fmt: skip
    for module in (cupy_driver, kernels):
        monkeypatch.setattr(module, "import_module", lambda name: SimpleNamespace(__version__="14.2.0", cuda=cuda))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch, "empty", lambda *size, device="cpu", **rest: empty(*size, **rest))
    return fake


@pytest.fixture
def driver(gpus: FakeCuda) -> CupyDriver:
    found = CupyDriver(1)
    gpus.calls.clear()
    return found


def spans(count: int) -> Spans:
    return Spans(*(np.arange(count, dtype=np.uint64) + base for base in (1 << 40, 2 << 40, 1)))


# streams, events, memory


def test_each_call_has_its_arguments_in_order(driver: CupyDriver, gpus: FakeCuda) -> None:
    """Streams do not wait for the default stream, and their kernels come first, where multiprocessors are few; events
    sleep and keep no time; memory is pinned for every context and mapped; an engine's streams and events are used by
    their pointers."""
    event, stream = driver.event_create(), driver.stream_create()
    (made_event, (_, settings)) = gpus.calls
    assert made_event == ("Event", {"block": True, "disable_timing": True})
    assert settings.pop("priority") < -5
    assert settings == {"non_blocking": True}
    assert (event.ptr, stream.ptr) == (EVENT, STREAM)
    gpus.calls.clear()
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
    assert gpus.calls == [
        ("eventRecord", EVENT, STREAM), ("streamWaitEvent", STREAM, EVENT), ("streamIsCapturing", STREAM),
        ("eventSynchronize", EVENT), ("streamSynchronize", STREAM), ("eventRecord", EVENT, 0),
        ("streamWaitEvent", 0, 0x99), ("eventDestroy", EVENT), ("streamDestroy", STREAM),
        ("hostRegister", 0x1000, 4096, 0x01 | 0x02), ("hostUnregister", 0x1000),
        ("hostAlloc", 4096, 0x01 | 0x02), ("freeHost", 0x5000), ("memGetInfo",),
    ]  # fmt: skip


# copies


@pytest.mark.parametrize(
    ("towards", "kind"), [(CopyDirection.IN, 1), (CopyDirection.OUT, 2), (CopyDirection.WITHIN, 3)]
)
def test_copies_name_destination_source_size_kind_stream(
    driver: CupyDriver, gpus: FakeCuda, library: FakeLibrary, towards: CopyDirection, kind: int
) -> None:
    driver.copy(driver.stream_from(STREAM), towards, spans(2))
    assert library.seen["attributes"][-1] == (towards is not CopyDirection.WITHIN), "the copy engines are slow within"
    driver.batches = False
    driver.copy(driver.stream_from(STREAM), towards, spans(2))
    assert gpus.calls == [
        ("memcpyAsync", (1 << 40) + i, (2 << 40) + i, 1 + i, kind, STREAM) for i in range(2)
    ]  # fmt: skip


def test_a_launch_has_blocks_of_1024_threads_and_its_table_as_the_one_parameter(
    driver: CupyDriver, gpus: FakeCuda
) -> None:
    table = kernels.table(np.array([1 << 40], np.uint64), np.array([2 << 40], np.uint64), [3, 4], [5, 6], width=7 << 33,
                          dst_pitch=8, src_pitch=9)  # fmt: skip
    driver.launch(driver.stream_from(STREAM), table, 12)
    parameters, call = gpus.calls
    assert parameters == ("parameters", table.tobytes())
    assert call[:10] == ("launchKernel", 0x20, 12, 1, 1, 1024, 1, 1, 0, STREAM)
    assert call[11:] == (0,)


def test_the_kernel_is_compiled_for_as_many_threads_as_it_gets_and_its_parameters_fit() -> None:
    assert "__launch_bounds__(1024)" in kernels.SOURCE
    assert kernels.THREADS == 1024
    assert kernels.TABLE.itemsize <= 4096


# opening


def test_the_kernel_is_loaded_by_its_name_as_machine_code_for_this_gpu(gpus: FakeCuda) -> None:
    CupyDriver(0)
    assert gpus.calls[-2:] == [("moduleLoadData", b"machine code"), ("moduleGetFunction", 0x10, kernels.NAME)]
    (options,) = [call[2] for call in gpus.calls if call[0] == "compileProgram"]
    assert "--gpu-architecture=sm_90" in options
    identity = CupyDriver(1).identity()
    assert identity[:4] == ("a GPU", (9, 0), 80 << 30, "0000:1A:00.0")
    assert (identity.driver, identity.batches) == (13000, True)


@pytest.mark.parametrize(("capability", "option"), [
    ((9, 0), "sm_90"), ((12, 0), "sm_120"), ((13, 5), "compute_120"), ((11, 0), "compute_100"), ((7, 0), "sm_70"),
])
def test_a_gpu_that_nvrtc_does_not_know_gets_the_newest_ptx_below_it(
    gpus: FakeCuda, capability: tuple[int, int], option: str
) -> None:
    """What is too old has no such PTX: NVRTC says so."""
    assert kernels.image_for(capability) == (b"ptx" if "compute" in option else b"machine code")
    (options,) = [call[2] for call in gpus.calls if call[0] == "compileProgram"]
    assert f"--gpu-architecture={option}" in options


def test_an_error_of_cupy_is_the_drivers_and_the_callers_device_is_left_alone(
    driver: CupyDriver, gpus: FakeCuda
) -> None:
    event, stream = driver.event_create(), driver.stream_create()
    attempts: list[tuple[str, Callable[[], object]]] = [
        ("Stream", driver.stream_create), ("Event", driver.event_create),
        ("memGetInfo", driver.free_memory), ("getDeviceProperties", driver.identity), ("setDevice", driver.use_device),
        ("hostRegister", lambda: driver.host_register(0, 1)),
        ("eventRecord", lambda: driver.event_record(event, stream)),
        ("memcpyAsync", lambda: driver.copy(stream, CopyDirection.IN, Spans(*np.ones((3, 1), np.uint64)))),
    ]  # fmt: skip
    for name, attempt in attempts:
        gpus.refuses = name
        with pytest.raises(DriverError, match="invalid argument") as told:
            attempt()
        assert (told.value.code, told.value.sticky) == (1, False)
        assert gpus.current == 0


def refused(message: str) -> Callable[..., torch.Tensor]:
    def refuse(*size: int, **rest: Any) -> torch.Tensor:
        raise RuntimeError(message)

    return refuse


def test_what_torch_refuses_when_the_device_opens_is_one_sentence(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
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
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).\nPlease", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    gpus.results["driverGetVersion"] = 11040
    missing = cupy_driver.find().missing
    assert missing == ("torch is built for CUDA 12.9 and cannot use a driver for CUDA 11.4: "
                       "The NVIDIA driver on your system is too old (found version 11040).")  # fmt: skip
    with pytest.raises(ConfigError, match=r"^device=cuda:1: torch is built for CUDA 12\.9"):
        open_device("cuda:1")


def test_a_machine_that_maps_pinned_memory_elsewhere_is_told_apart(driver: CupyDriver, gpus: FakeCuda) -> None:
    """WSL2 does."""
    assert driver.identity().registers
    gpus.results["deviceGetAttribute"] = 0
    assert not driver.identity().registers
    assert ("deviceGetAttribute", 91, 1) in gpus.calls


def test_a_gpu_that_is_not_there(gpus: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="there are 2 GPUs, counted from 0"):
        open_device("cuda:2")


def test_nvrtc_that_is_not_installed_is_told(gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError("libnvrtc.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(kernels, "import_module", absent)
    with pytest.raises(ConfigError, match=r"NVRTC is not installed: libnvrtc\.so\.12: cannot open shared object file$"):
        open_device("cuda:0")


def test_nvrtc_whose_library_is_missing_is_told_too(gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """cupy 14.2 says so by an error of its own, which is no ImportError, at the first call."""
    class DynamicLibNotFoundError(RuntimeError):
        pass

    def missing() -> Any:
        raise DynamicLibNotFoundError("libnvrtc.so.12 is not there")

    monkeypatch.setattr(gpus, "getSupportedArchs", missing, raising=False)
    with pytest.raises(kernels.NoCompiler, match="NVRTC is not installed: libnvrtc"):
        kernels.architectures()
    monkeypatch.setattr(gpus, "getSupportedArchs", refused("something else"), raising=False)
    with pytest.raises(RuntimeError, match="something else"):
        kernels.architectures()


# The calls of the library, and what a machine without a GPU is told.


A_STREAM = SimpleNamespace(ptr=STREAM)
ROOT = FilePath(__file__).parents[2]
WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_without_a_gpu_one_sentence_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^device=cuda:0: .*(cupy is not installed|no NVIDIA driver|sees no GPU)"):
        open_device("cuda:0")


@pytest.mark.slow
def test_the_device_is_there_without_cupy() -> None:
    code = ("import sys, asynccache.memory.cuda.device, asynccache.memory.cuda.cupy_driver, asynccache.runtime.cache\n"
            "sys.exit('cupy' in sys.modules)")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(("version", "devices", "torch_cuda", "says"), [
    (0, 0, "13.0", "no NVIDIA driver"), (13000, 0, "13.0", "sees no GPU"), (13000, 1, None, "torch is for the CPU"),
    (13000, 1, "13.0", ""),
])
def test_what_is_missing_is_named(
    gpus: FakeCuda, monkeypatch: pytest.MonkeyPatch, version: int, devices: int, torch_cuda: str | None, says: str
) -> None:
    gpus.results |= {"driverGetVersion": version, "getDeviceCount": devices}
    gpus.refuses = "getDeviceCount" if not devices else None
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    missing = cupy_driver.find().missing
    assert says in missing
    assert bool(says) is bool(missing)


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


# libcuda


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


def test_a_driver_that_refuses_its_first_batch_copies_one_by_one_from_then_on(
    driver: CupyDriver, library: FakeLibrary, gpus: FakeCuda
) -> None:
    library.answer = 1
    assert driver.copy(A_STREAM, CopyDirection.OUT, spans(3)) == 3  # entries of the driver's queue
    assert driver.copy(A_STREAM, CopyDirection.IN, spans(2)) == 2
    assert [call[3:] for call in gpus.calls] == [
        (1, 2, STREAM), (2, 2, STREAM), (3, 2, STREAM), (1, 1, STREAM), (2, 1, STREAM)
    ]  # fmt: skip


def test_a_driver_that_took_a_batch_once_fails_a_later_one(
    driver: CupyDriver, library: FakeLibrary, gpus: FakeCuda
) -> None:
    assert driver.copy(A_STREAM, CopyDirection.OUT, spans(9)) == 2
    library.answer = 1
    with pytest.raises(DriverError):
        driver.copy(A_STREAM, CopyDirection.OUT, spans(3))
    assert gpus.calls == []


def test_a_device_that_has_failed_is_not_a_driver_without_batches(
    driver: CupyDriver, library: FakeLibrary, gpus: FakeCuda
) -> None:
    library.answer = 719
    with pytest.raises(DriverError, match="719"):
        driver.copy(A_STREAM, CopyDirection.OUT, spans(3))
    assert gpus.calls == []


# the current device


def test_each_call_means_this_device_spoils_nobodys_graph_and_leaves_the_callers_thread_as_it_was(
    gpus: FakeCuda, library: FakeLibrary
) -> None:
    """torch captures in the mode in which calls of other threads are refused, and end the capture."""
    driver = CupyDriver(1)
    event, stream = driver.event_create(), driver.stream_create()
    calls: list[Callable[[], object]] = [
        lambda: driver.event_record(event, stream), lambda: driver.stream_wait_event(stream, event),
        lambda: driver.host_register(1 << 20, 4096), lambda: driver.host_unregister(1 << 20),
        lambda: driver.host_alloc(4096), lambda: driver.host_free(1 << 20), driver.free_memory,
        *(lambda pointer=pointer: driver.event_query(driver.event_from(pointer)) for pointer in (8, 16, 24)),
        lambda: driver.event_destroy(event), lambda: driver.stream_destroy(stream),
    ]  # fmt: skip
    for call in calls:
        with suppress(DriverError):  # of the event that failed
            call()
        assert (gpus.current, library.mode) == (0, 0), "whatever the answer"
    asked = ("moduleLoadData", "moduleGetFunction", "Stream", "Event", "eventRecord", "streamWaitEvent", "hostRegister",
             "hostUnregister", "hostAlloc", "freeHost", "memGetInfo", "eventDestroy", "streamDestroy")  # fmt: skip
    assert {name: gpus.under[name] for name in asked} == dict.fromkeys(asked, (1, 2))
    assert library.seen["queries"] == [2, 2, 2]


def test_a_thread_of_the_device_is_put_on_it_and_relaxed_for_good(driver: CupyDriver, library: FakeLibrary) -> None:
    """So it does not spoil a graph that another captures."""
    library.modes.clear()
    driver.free_memory()
    assert library.modes == [2, 0], "the caller's thread is left as it is"
    driver.use_device()
    assert driver.runtime.current == 1
    driver.free_memory()
    assert library.modes == [2, 0, 2]


def test_a_device_opens_in_a_thread_that_has_no_context(gpus: FakeCuda) -> None:
    """An engine's thread of execution has one; a fresh thread has none, also where it is on the right device already,
    and torch, which has memory at hand, asks CUDA for nothing."""
    opened: list[CupyDriver] = []
    for index in (0, 1):
        thread = threading.Thread(target=lambda index=index: opened.append(CupyDriver(index)))
        thread.start()
        thread.join()
    assert [driver.index for driver in opened] == [0, 1]


# streams of engines


def test_streams_of_torch_cupy_and_the_protocol() -> None:
    streams = (SimpleNamespace(cuda_stream=16), SimpleNamespace(ptr=32), SimpleNamespace(__cuda_stream__=(0, 48)),
               SimpleNamespace(__cuda_stream__=lambda: (0, 64)), 80)  # fmt: skip
    assert [stream_pointer(stream) for stream in streams] == [16, 32, 48, 64, 80]
    with pytest.raises(ConfigError, match="no CUDA stream"):
        stream_pointer(object())
