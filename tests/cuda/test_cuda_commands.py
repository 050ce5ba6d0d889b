"""The commands and the benchmark of CUDA with a simulated driver and without a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.cli import doctor
from asynccache.cli.main import main
from asynccache.errors import ConfigError
from asynccache.memory.cuda import device as cuda_device
from asynccache.memory.cuda.cupy_driver import FoundCuda
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import DriverError, Spans
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.device import CopyDirection
from benchmarks import cuda, cuda_copies, cuda_engine
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import GPU, driver_of
from tests.cuda.simulated_cuda import SimulatedCuda

# ``asynccache doctor`` and ``stress``: their output without a GPU, and with a simulated one. Figures on such a driver
# mean nothing.


WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_doctor_says_in_plain_words_and_in_json_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("No GPU can be used here: ", 'device="cpu"', "ulimit -l"):
        assert words in said
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    report = json.loads((tmp_path / "d.json").read_text())
    assert report["devices"] == 0
    assert report["missing"]
    assert report["limits"]["available_bytes"] > 0


@pytest.mark.parametrize(("name", "why"), [("cpu", " is no GPU"), ("gpu0", ": unknown device 'gpu0'")])
def test_what_is_no_gpu_is_refused_before_anything_is_measured(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--device", name]) == 2
    assert f"asynccache: --device={name}{why}" in capsys.readouterr().err


def found() -> FoundCuda:
    return FoundCuda("14.2.0", "13.0", 1, 13000, "", 12090)


@pytest.fixture
def with_gpu(simulated_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is the simulated one."""
    for name, value in {"LAYERS": 2, "PAGES": 64, "WIDTH": 1 << 10, "ROUNDS": 1, "WAKE_UPS": 5}.items():
        monkeypatch.setattr(doctor, name, value)
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    settings = CudaSettings(kernel_loads_below=8192)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device(settings=settings))


def test_doctor_tells_what_will_be_used_and_why(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("asynccache.memory.cuda.kernels.compile_for", lambda capability: bytes(7000))
    monkeypatch.setattr(doctor, "numa_node", lambda bus: 1)
    assert main(["doctor"]) == 0
    said = " ".join(capsys.readouterr().out.split())   # however the lines were broken
    for words in ("a simulated GPU", "CUDA 13.0, 1 GPUs", "many in one call", "wake-up p50",
                  "compiles the copy kernel", "14.2.0, for CUDA 12.9", "for CUDA 13.0",
                  "a driver for CUDA 13 or newer is needed", "numactl --preferred=1",
                  "pip install 'cupy-cuda13x>=14.0' 'nvidia-cuda-nvrtc>=13,<14'",
                  "device to host, pieces of 1.0 KiB: ", "host to device, pieces of 1.0 KiB: ",
                  "GB/s by the copy engines and ", "64 pages of 2 layers came back whole by both",
                  "settings kernel_loads_below=8192, kernel_backups_below=0, blocks=8"):  # fmt: skip
        assert words in said


def test_doctor_tells_the_figures_in_json_too(with_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"] == {"kernel_loads_below": 8192, "kernel_backups_below": 0, "blocks": 8}
    for path in ("engines", "kernel"):
        assert report["copies"][path]["whole"]
        for direction in ("device to host", "host to device"):
            assert report["copies"][path][direction] >= 0, "rounded: a busy machine copies a few kilobytes slowly"
    assert 0 < report["wake_up"]["p50_us"] <= report["wake_up"]["p99_us"]


@pytest.mark.parametrize(("loses", "says"), [("launch", "the kernel"), ("copy", "the copy engines")])
def test_a_gpu_that_loses_bytes_is_no_gpu_to_use(
    with_gpu: None, drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    loses: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(SimulatedCuda, loses, lambda self, *arguments: 1)
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"it cannot be used: pages that went by {says} came back with wrong bytes" in said


@pytest.mark.parametrize("stage", ["it opens", "it is measured", "it is out of host memory"])
def test_a_gpu_that_fails_when_it_opens_or_is_measured_is_told(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    failure = MemoryError() if "host" in stage else DriverError("out of memory\nmore of it")

    async def fail(device: object) -> object:
        raise failure

    def opened(name: str) -> CudaDevice:
        if stage == "it opens":
            raise ConfigError(f"device={name}: out of memory")
        return simulated_device()

    def no_library(capability: object) -> bytes:
        raise RuntimeError("no library\nof that name")

    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: FoundCuda("14.2.0", "13.0", 1, 13000, ""))
    monkeypatch.setattr("asynccache.memory.cuda.kernels.compile_for", no_library)
    monkeypatch.setattr(cuda_device, "open_device", opened)
    if stage != "it opens":
        monkeypatch.setattr(doctor, "measured", fail)
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"it cannot be used: {'device=cuda:0: ' * (stage == 'it opens')}out of memory" in said
    assert "more of it" not in said
    assert "does not work: no library" in said


def test_the_numa_node_of_a_device_that_the_system_does_not_know() -> None:
    assert doctor.numa_node("ffff:ff:ff.0") is None


@pytest.mark.slow
def test_stress_runs_on_the_device_with_faults_and_cancellations(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every page is verified; the driver looks for races."""
    monkeypatch.setattr(cuda_device, "open_device", lambda name, *, faults: simulated_device(faults=faults))
    options = ["--requests", "60", "--rate", "0", "--faults", "0.1", "--cancel-rate", "0.1", "--device-tokens", "8192"]
    path = tmp_path / "run.json"
    assert main(["stress", "--device", "cuda:0", *options, "--quiet", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["ok"]


@WITHOUT
def test_stress_says_in_a_sentence_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stress", "--device", "cuda:0", "--requests", "1", "--quiet"]) == 2
    assert "asynccache: device=cuda:0: " in capsys.readouterr().err


# ``python -m benchmarks.cuda``: every figure with a simulated driver, and what it says without a GPU. Figures of such
# a driver mean nothing; that they are there, and that the copies they are made of move the right bytes, does.


ROOT = Path(__file__).parents[2]
IN, OUT, WITHIN = CopyDirection.IN, CopyDirection.OUT, CopyDirection.WITHIN


@pytest.mark.slow
@WITHOUT
def test_without_a_gpu_the_program_ends_with_a_sentence_and_a_status() -> None:
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    told = subprocess.run([sys.executable, "-W", "error", "-m", "benchmarks.cuda", "--json"], cwd=ROOT, env=path,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert told.stderr.startswith("benchmarks.cuda: there is no GPU to measure: ")


@pytest.mark.parametrize(("arguments", "says"), [
    (["--device", "cpu"], "cpu is no GPU"), (["nothing"], "'nothing' is none of pieces, pages, "),
])
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = cuda.main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert says in capsys.readouterr().err


class TorchStream:
    """``torch.cuda.Stream``, whose kernels run at once. Made by ``torch_on``."""

    driver: SimulatedCuda

    def __init__(self, device: int) -> None:
        self.cuda_stream = self.driver.stream_create()


class TorchEvent:
    """``torch.cuda.Event``: the host's clock, since kernels run at once."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: TorchStream) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: TorchEvent) -> float:
        return (end.at - self.at) * 1e3


Measured = Callable[..., CudaDevice]


@pytest.fixture
def measured(simulated_device: Make, small: None, monkeypatch: pytest.MonkeyPatch) -> Measured:
    """Makes a device that is measured, and a torch with a GPU: products on the CPU, streams on the device's driver."""

    def put(**how: Any) -> CudaDevice:
        device, randn = simulated_device(**how), torch.randn
        monkeypatch.setattr(TorchStream, "driver", driver_of(device), raising=False)
        monkeypatch.setattr(torch, "randn", lambda *size, device, **rest: randn(*size, **rest))
        for name, thing in (("Stream", TorchStream), ("Event", TorchEvent), ("stream", nullcontext),
                            ("synchronize", lambda index: None)):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, thing)
        monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
        monkeypatch.setattr(cuda_device, "open_device", lambda name: device)
        monkeypatch.setattr(cuda_copies, "raw_calls", raw_on)
        return device

    return put


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few and small copies: a simulated driver moves a page in milliseconds."""
    for name, value in {"SIZE": 1 << 20, "MOST": 1 << 16, "WIDTHS": (4 << 10, 64 << 10), "COUNTS": (8, 16), "ROUNDS": 1,
                        "ROWS": (1 << 10,), "PAGES": 4, "LAYERS": 4}.items():
        monkeypatch.setattr(cuda_copies, name, value)
    for name, value in {"SIDE": 8, "LAYERS": 4, "LOADS": ((1 << 10, 8),), "ROUNDS": 1, "SAMPLES": 2, "WAKES": 3,
                        "PRODUCTS": 2, "TOKEN_COPIES": 3, "PIECES": 8, "PINNED": 1 << 20, "BUSY": 0.001,
                        "CALLS": (("a copy", 4 << 10, 1), ("a launch", 4 << 10, 20))}.items():
        monkeypatch.setattr(cuda_engine, name, value)


def raw_on(driver: SimulatedCuda) -> cuda_copies.RawCalls:
    """Calls that move bytes as CUDA's do: ``cuMemcpyBatchAsync`` and ``cudaMemcpy2DAsync``."""
    directions = {1: IN, 2: OUT}

    def batch(stream: int, copies: Spans, order: int, flags: int) -> None:
        on_host = int(copies.dst[0]) in range(*next((a, a + n) for a, n in driver.pinned.items()))
        from_host = int(copies.src[0]) in range(*next((a, a + n) for a, n in driver.pinned.items()))
        assert order == 1 or from_host, "only from memory that nobody writes"
        driver.copy(stream, OUT if on_host else IN if from_host else WITHIN, copies)

    def copy_2d(dst: int, to: int, src: int, of: int, width: int, height: int, kind: int, stream: int) -> None:
        to_rows, of_rows = (np.array([base + i * pitch for i in range(height)], np.uint64)
                            for base, pitch in ((dst, to), (src, of)))  # fmt: skip
        driver.copy(stream, directions[kind], Spans(to_rows, of_rows, np.full(height, width, np.uint64)))

    return cuda_copies.RawCalls(batch, copy_2d)


def test_the_command_measures_and_tells_everything(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured()
    path = tmp_path / "cuda.json"
    assert cuda.main(["--json", str(path)]) == 0
    figures, said = json.loads(path.read_text()), capsys.readouterr().out
    assert list(figures["seconds"]) == list(cuda.PARTS)
    assert [(row["direction"], row["width"], row["pieces"]) for row in figures["pieces"]] == [
        (towards.value, width, count) for towards in (OUT, IN, WITHIN) for width in (4096, 65536) for count in (8, 16)
        if width * count <= 1 << 19
    ]  # fmt: skip
    ways = {OUT.value: {"engines", "kernel 2", "kernel 4", "kernel 8", "single", "no flag"}}
    ways[IN.value] = ways[OUT.value] | {"any"}
    ways[WITHIN.value] = {"engines", "kernel 8", "kernel 64", "single", "no flag"}
    assert all(row["gb_s"].keys() == row["call_us"].keys() == ways[row["direction"]] for row in figures["pieces"])
    assert all(rate > 0 for row in figures["pieces"] for rate in row["gb_s"].values())
    assert all(rate > 0 for rate in figures["large_gb_s"].values())
    assert [(row["direction"], row["row"]) for row in figures["pages"]] == [(OUT.value, 1024), (IN.value, 1024)]
    assert [row["counted"] for row in figures["queue"]] == [1, 2]
    assert {row["beside"] for row in figures["waking"]} == {"nothing", "Python", "Python, 0.5 ms"}
    assert all(0 < row["wake_p50_us"] <= row["wake_p99_us"] for row in figures["waking"])
    assert len(figures["beside"]) == 1 + 2 * (2 + 3)
    assert all(row["gb_s"] >= 0 and row["token_copy_p50_us"] > 0 for row in figures["beside"][1:])
    assert [(row["path"], row["tokens"]) for row in figures["loads"]] == [("engines", 8 * 16), ("kernel", 8 * 16)]
    assert figures["pinning"]["pin_s"] >= 0
    assert [one["direction"] for one in figures["settings"]] == [OUT.value, IN.value]
    for title in ("8 pieces in a call: GB/s", "2-D copies", "behind a busy stream", "A load of 32 layers, ms, and a",
                  "Beside copies", "Loads of 32 layers beside computing", "Pinning 1.0 MiB",
                  "sys.setswitchinterval(0.0005)", "what these figures would set",
                  "batches sources read in any order"):  # fmt: skip
        assert title in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("towards", [OUT, IN, WITHIN])
def test_every_way_moves_the_same_pieces(simulated_device: Make, small: None, towards: CopyDirection) -> None:
    device = simulated_device()
    driver = driver_of(device)
    memory = cuda_copies.Memory(driver)
    dst, src = memory.bases(towards)
    pieces = cuda_copies.Pieces(memory, towards, 4 << 10, 16)
    random = np.random.default_rng(3).integers(1, 256, cuda_copies.SIZE, np.uint8).tobytes()
    ctypes.memmove(src, random, len(random))
    arrived = {}
    for way, copy in pieces.ways(raw_on(driver)).items():
        ctypes.memset(dst, 0, cuda_copies.SIZE)
        copy()
        driver.stream_synchronize(memory.stream)
        arrived[way] = ctypes.string_at(dst, cuda_copies.SIZE)
    assert len(set(arrived.values())) == 1, arrived.keys()
    assert sum(map(bool, arrived["engines"])) == pieces.bytes == 16 * 4096
    memory.close()
    asyncio.run(device.aclose())


def rows(engines: dict[int, float], few_kernel: float = 40.0) -> list[Any]:
    """Rows of loads, whose kernel reaches 40 GB/s with 512 pieces; ``engines``: their rate by width in KiB."""
    return [
        {"direction": IN.value, "width": kib << 10, "pieces": count,
         "gb_s": {"engines": rate, "kernel 2": 20.0, "kernel 4": 38.0,
                  "kernel 8": 40.0 if count == 512 else few_kernel}}
        for kib, rate in engines.items() for count in (8, 32, 512)
    ]  # fmt: skip


@pytest.mark.parametrize(("engines", "few_kernel", "below", "few"), [
    ({4: 5, 16: 20, 64: 36, 512: 50}, 40.0, 64 << 10, 8),
    ({4: 5, 16: 20, 64: 36, 512: 50}, 10.0, 64 << 10, 512),
    ({4: 50, 16: 50, 64: 50, 512: 50}, 40.0, 0, None),
    ({4: 5, 16: 5, 64: 5, 512: 5}, 40.0, 1 << 20, 8),
])
def test_the_settings_that_figures_speak_for(
    engines: dict[int, float], few_kernel: float, below: int, few: int | None
) -> None:
    """The threshold is where the copy engines suffice for many pieces; ``few`` where the kernel pays; blocks are the
    least that are nearly as fast as the best."""
    told = cuda_copies.suggested(rows(engines, few_kernel), IN, CudaSettings(blocks=8))
    assert told["kernel_below"]["measured"] == below
    assert told["few"]["measured"] == few
    assert told["blocks"] == {"set": 8, "measured": 4}


@pytest.mark.parametrize(("how", "says"), [
    ({"pinnable": 1 << 10}, "host memory cannot be pinned"), ({"break_at": 5}, "an illegal memory access"),
])
@pytest.mark.parametrize("part", ["pieces", "loads"])
def test_a_gpu_that_fails_is_one_sentence(
    measured: Measured, capsys: pytest.CaptureFixture[str], how: Any, says: str, part: str
) -> None:
    measured(**how)
    assert cuda.main([part, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert "benchmarks.cuda: the GPU could not be measured: " in said
    assert says in said
    assert said.count("\n") == 1


def test_a_thread_that_copies_beside_fails_the_measurement(simulated_device: Make) -> None:
    driver = driver_of(simulated_device())

    def fail() -> None:
        raise RuntimeError("no copy")

    with pytest.raises(RuntimeError, match="no copy"), cuda_engine.Copies(driver, driver.stream_create(), fail):
        pass


@pytest.mark.parametrize("last", [-1.0, 3600.0])
def test_a_part_that_would_begin_too_late_is_left_out_and_named(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, last: float
) -> None:
    monkeypatch.setattr(cuda, "LAST_START", last)
    figures = cuda.measure(measured(), ["queue", "pinning"], lambda _: None)
    left_out = ["queue", "pinning"] if last < 0 else []
    assert figures["left_out"] == left_out
    assert [part for part in ("queue", "pinning") if part not in figures] == left_out
    told = [row.name for chart in cuda.charts(figures) for row in chart.rows]
    assert told[: len(left_out)] == left_out


class TestOnAGpu:
    pytestmark = GPU

    def test_it_measures_everything(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Less of it: other tests share the GPU."""
        for name, value in {"SIZE": 1 << 28, "WIDTHS": (4 << 10, 64 << 10), "COUNTS": (8, 64), "ROUNDS": 1}.items():
            monkeypatch.setattr(cuda_copies, name, value)
        for name, value in {"LOADS": ((16 << 10, 64),), "ROUNDS": 1, "SAMPLES": 2, "WAKES": 20, "PINNED": 1 << 28,
                            "PRODUCTS": 20, "TOKEN_COPIES": 20}.items():
            monkeypatch.setattr(cuda_engine, name, value)
        path = tmp_path / "cuda.json"
        assert cuda.main(["--quiet", "--json", str(path)]) == 0
        figures = json.loads(path.read_text())
        assert not [part for part in cuda.PARTS if not figures.get(part)]
        assert min(figures["large_gb_s"].values()) > 0.5


# ``make test-gpu`` on a machine that has torch and cupy and no package index: what is missing is a sentence, and no
# test that needs the GPU skips silently.


PYTHONPATH = os.pathsep.join(filter(None, sys.path))


def run_of(folder: Path) -> subprocess.CompletedProcess[str]:
    """``make test-gpu`` on this interpreter, with the wheels of ``folder``."""
    return done("make", "test-gpu", "VENV=", f"PYTHON={sys.executable}", f"WHEELS={folder}", f"GPU_SITE={folder}/site",
                PIP_NO_INDEX="1")  # fmt: skip


def done(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)


@WITHOUT
@pytest.mark.slow(4)
@pytest.mark.parametrize(("required", "status", "says"), [
    ("", 0, "1 skipped"), ("required", 1, "ASYNCCACHE_GPU=required, and yet: needs a GPU: "),
])
def test_a_gpu_test_without_a_gpu_fails_where_the_gpu_is_required(required: str, status: int, says: str) -> None:
    ran = done(sys.executable, "-m", "pytest", "-q", "-p", "pytest_asyncio.plugin", "tests/cuda/test_cuda_gpu.py", "-k",
               "thousands", PYTHONPATH=PYTHONPATH, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", ASYNCCACHE_GPU=required)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert says in ran.stdout


@pytest.mark.slow
def test_a_warning_of_cupys_import_does_not_make_the_gpu_tests_skip(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(
        "import warnings\nwarnings.warn('numpy is newer than we know')\n__version__ = '14.2.0'\n"
        "class cuda:\n    class runtime:\n        driverGetVersion = getDeviceCount = runtimeGetVersion = int\n"
    )
    ran = done(sys.executable, "-W", "error", "-c", "from tests.cuda.cuda_kit import MISSING; print(MISSING)",
               PYTHONPATH=f"{tmp_path}{os.pathsep}{PYTHONPATH}")  # fmt: skip
    assert ran.stdout == "there is no NVIDIA driver on this machine\n", ran.stderr


def test_without_wheels_the_run_says_what_brings_them(tmp_path: Path) -> None:
    ran = run_of(tmp_path)
    assert ran.returncode != 0
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"there are no wheels in {tmp_path}; " in ran.stderr
    assert f"make test-gpu-wheels PYTHON_VERSION={version} brings them" in ran.stderr


@WITHOUT
@pytest.mark.slow(6)
def test_the_run_unpacks_its_wheels_without_an_index_and_ends_where_doctor_sees_no_gpu(tmp_path: Path) -> None:
    info = "brought-1.dist-info"
    with zipfile.ZipFile(tmp_path / "brought-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"brought.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    ran = run_of(tmp_path)
    assert ran.returncode != 0
    assert (tmp_path / "site" / "brought.py").exists(), ran.stderr
    assert "No GPU can be used here: " in ran.stdout
    assert "test-gpu ends here: " in ran.stderr
    assert "-m pytest" not in ran.stdout


@pytest.mark.parametrize("goals", [["check"], [], ["test-gpu", "clean"]])
def test_nothing_but_test_gpu_runs_without_a_virtual_environment(goals: list[str]) -> None:
    ran = done("make", "-n", *goals, "VENV=")
    assert ran.returncode == 2
    assert "VENV= (no virtual environment) is for make test-gpu alone" in ran.stderr
