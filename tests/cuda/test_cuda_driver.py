"""The real driver, as far as it can be tested without a GPU: its calls of the library, and its messages on a machine
that has no GPU."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
import threading
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
from asynccache.memory.cuda.device import open_device
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.cuda.streams import stream_pointer
from asynccache.memory.device import CopyDirection
from tests.cuda.test_cuda_calls import FakeEvent, FakeStream

STREAM = SimpleNamespace(ptr=0x77)
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


class FakeCupy:
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
    monkeypatch.setattr(FakeCupy.cuda.runtime, "version", version)
    monkeypatch.setattr(FakeCupy.cuda.runtime, "devices", devices)
    monkeypatch.setattr(cupy_driver, "import_module", lambda name: FakeCupy)
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
    assert driver.copy(STREAM, CopyDirection.OUT, spans(3)) == 3  # entries of the driver's queue
    assert driver.copy(STREAM, CopyDirection.IN, spans(2)) == 2
    assert [c[2:] for c in runtime.copies] == [(1, 2, 0x77), (2, 2, 0x77), (3, 2, 0x77), (1, 1, 0x77), (2, 1, 0x77)]


def test_a_driver_that_took_a_batch_once_fails_a_later_one(library: FakeLibrary) -> None:
    driver, runtime = driver_on(library)
    assert driver.copy(STREAM, CopyDirection.OUT, spans(9)) == 2
    assert runtime.copies == []
    library.answer = 1
    with pytest.raises(DriverError):
        driver.copy(STREAM, CopyDirection.OUT, spans(3))


def test_a_device_that_has_failed_is_not_a_driver_without_batches(library: FakeLibrary) -> None:
    driver, runtime = driver_on(library)
    library.answer = 719
    with pytest.raises(DriverError, match="719"):
        driver.copy(STREAM, CopyDirection.OUT, spans(3))
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
