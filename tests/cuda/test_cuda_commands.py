"""``asynccache doctor`` and ``asynccache bench cuda``: their output without a GPU, and every figure with a simulated
one. The figures on such a driver mean nothing."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from asynccache.cli import bench_cuda, cuda_copies, doctor
from asynccache.cli.main import main
from asynccache.memory.cuda import device as cuda_device
from asynccache.memory.cuda.cupy_driver import FoundCuda
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver_protocol import DriverError
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.device import CopyDirection
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import driver_of
from tests.cuda.simulated_cuda import SimulatedCuda

WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_doctor_says_in_plain_words_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "No GPU can be used here: " in said
    assert 'device="cpu"' in said
    assert "ulimit -l" in said


@WITHOUT
def test_doctor_says_it_in_json_too(capsys: pytest.CaptureFixture[str], tmp_path: FilePath) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"]
    assert report["limits"]["available_bytes"] > 0
    assert main(["doctor", "--json", str(tmp_path / "d.json")]) == 0
    assert json.loads((tmp_path / "d.json").read_text())["devices"] == 0


@WITHOUT
@pytest.mark.parametrize("arguments", [["--json"], [], ["--json", "-"]])
def test_bench_cuda_says_in_a_sentence_that_there_is_no_gpu(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "cuda", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "there is no GPU to measure: " in said.err


@pytest.mark.parametrize("command", [["bench", "cuda"], ["doctor"]])
@pytest.mark.parametrize(("name", "why"), [("cpu", "cpu is no GPU"), ("gpu0", "unknown device 'gpu0'")])
def test_what_is_no_gpu_is_refused_before_anything_is_measured(
    command: list[str], name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--device", name]) == 2
    assert f"asynccache: --device={name}: {why}" in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "WIDTHS", (4 << 10, 16 << 10, 64 << 10))
    for name, value in {"SIDE": 8, "LAYERS": 4, "PAGES": 8, "PAGE_BYTES": 1 << 12, "BUFFER": 4 << 20, "ROUNDS": 1,
                        "SAMPLES": 5}.items():
        monkeypatch.setattr(bench_cuda, name, value)


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


@pytest.fixture
def torch_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[SimulatedCuda], None]:
    """torch with a GPU: products on the CPU, streams on this driver."""

    def put(driver: SimulatedCuda) -> None:
        monkeypatch.setattr(TorchStream, "driver", driver, raising=False)
        randn = torch.randn
        monkeypatch.setattr(torch, "randn", lambda *size, device, **rest: randn(*size, **rest))
        for name, thing in (("Stream", TorchStream), ("Event", TorchEvent), ("stream", nullcontext),
                            ("synchronize", lambda index: None)):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, thing)

    return put


def test_the_benchmark_measures_everything(
    simulated_device: Make, small: None, torch_on: Callable[[SimulatedCuda], None]
) -> None:
    device = simulated_device()
    torch_on(driver_of(device))
    figures = asyncio.run(bench_cuda.measure(device, lambda _: None))
    json.dumps(figures)
    rows = figures["copies"]["pieces"]
    assert [(r["width"], r["direction"], r["path"]) for r in rows] == [
        (width, direction, path) for width, path in ((4096, "kernel"), (16384, "kernel"), (65536, "dma"))
        for direction in ("device to host", "host to device")
    ]  # fmt: skip
    assert all(r["dma_gb_s"] > 0 and r["kernel_gb_s"] > 0 for r in rows)
    assert all(rate > 0 for rate in figures["copies"]["large_gb_s"].values())
    assert figures["copies"]["kernel_below"]["set"] == 32768
    assert 0 < figures["wake_up"]["p50_us"] <= figures["wake_up"]["p99_us"]
    leases = figures["leases"]
    assert leases["ratio"] > 0
    assert leases["load_s"] > 0
    assert leases["tokens"] == 8 * 16  # each lease loads its whole prompt
    assert 0 < leases["wait_layer_p50_us"] <= leases["wait_layer_max_us"]


def test_the_command_tells_every_figure(
    simulated_device: Make, small: None, torch_on: Callable[[SimulatedCuda], None], monkeypatch: pytest.MonkeyPatch,
    tmp_path: FilePath, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    device, path = simulated_device(), tmp_path / "cuda.json"
    torch_on(driver_of(device))
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: device)
    assert main(["bench", "cuda", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    said = capsys.readouterr().out
    for row in figures["copies"]["pieces"]:
        start = f"{row['direction']}, pieces of {row['width'] >> 10}.0 KiB"
        assert sum(line.startswith(start) for line in said.splitlines()) == 1
    words = " ".join(said.split())
    for told in ("one large copy", "kernel_below is 32768", "to wake a coroutine, µs: p50",
                 "a load of 4 layers takes", "wait_layer in the caller's thread"):  # fmt: skip
        assert told in words
    assert max(map(len, said.splitlines())) <= 80


def test_the_threshold_that_figures_speak_for_is_where_the_copy_engines_suffice() -> None:
    def rows(*dma: float) -> list[Any]:
        return [{"width": width, "dma_gb_s": one, "kernel_gb_s": 40.0}
                for width, one in zip(cuda_copies.WIDTHS, dma, strict=True)]  # fmt: skip

    assert cuda_copies.crossover(rows(5, 20, 36, 50, 50)) == 64 << 10
    assert cuda_copies.crossover(rows(50, 50, 50, 50, 50)) == 4 << 10
    assert cuda_copies.crossover(rows(5, 5, 5, 5, 5)) == 4 << 20


def test_a_copy_that_fails_is_no_time(simulated_device: Make) -> None:
    device = simulated_device(break_at=0)
    pages = cuda_copies.CopyPools(device, 1 << 20, 4096)
    with pytest.raises(DriverError, match="illegal memory access"):
        pages.rate(device, CopyDirection.OUT, 1)
    asyncio.run(device.aclose())


@pytest.mark.parametrize(("how", "says"), [
    ({"pinnable": 1 << 20}, "host memory cannot be pinned"),
    ({"break_at": 5}, "bench cuda: the GPU could not be measured: an illegal memory access"),
])
def test_a_bench_that_the_gpu_ends_is_one_sentence(
    simulated_device: Make, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    how: Any, says: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: FoundCuda("14.2.0", "13.0", 1, 13000, ""))
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device(**how))
    assert main(["bench", "cuda"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def found() -> FoundCuda:
    return FoundCuda("14.2.0", "13.0", 1, 13000, "", 12090)


@pytest.fixture
def with_gpu(simulated_device: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose GPU is the simulated one."""
    monkeypatch.setattr(doctor, "SMALL_BUFFER", 2 << 20)
    monkeypatch.setattr(cuda_copies, "WIDTHS", (4 << 10, 16 << 10, 64 << 10))
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    settings = CudaSettings(kernel_below=8192)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device(settings=settings))


def test_doctor_tells_what_will_be_used_and_why(
    with_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "nvrtc", lambda: {"compiles": True, "bytes": 7000})
    monkeypatch.setattr(doctor, "numa_node", lambda bus: 1)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("a simulated GPU", "CUDA 13.0, 1 GPUs", "many in one call", "for one large copy", "wake-up   p50",
                  "compiles the copy kernel", "14.2.0, for CUDA 12.9", "for CUDA 13.0",
                  "a driver for CUDA 13 or newer is needed", "numactl --preferred=1",
                  "pip install 'cupy-cuda13x>=14.0' 'nvidia-cuda-nvrtc>=13,<14'",
                  "kernel_below is 8192: shorter pieces go by the kernel; these figures speak for "):  # fmt: skip
        assert words in said
    for direction in ("device to host", "host to device"):
        for width, path in (("4.0 KiB", "kernel"), ("16.0 KiB", "copy engines"), ("64.0 KiB", "copy engines")):
            (line,) = (line for line in said.splitlines() if f"{direction}, pieces of {width}: " in line)
            assert line.endswith(f"; the {path} will be used")


def test_doctor_tells_the_figures_in_json_too(with_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["settings"] == {"kernel_below": 8192, "blocks": 8}
    assert [row["path"] for row in report["copies"]["pieces"]] == ["kernel"] * 2 + ["dma"] * 4
    assert report["wake_up"]["samples"] > 0


@pytest.mark.parametrize("failure", [DriverError("out of memory\nmore of it"), MemoryError()])
def test_a_gpu_that_fails_while_doctor_measures_is_told(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception
) -> None:
    async def fail(device: object) -> object:
        raise failure

    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device())
    monkeypatch.setattr(doctor, "measured", fail)
    assert main(["doctor"]) == 1
    assert "it cannot be used: out of memory\n" in capsys.readouterr().out


def test_a_gpu_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from asynccache.errors import ConfigError

    def refuse(name: str) -> CudaDevice:
        raise ConfigError(f"device={name}: out of memory")

    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: FoundCuda("14.2.0", "13.0", 1, 13000, ""))
    monkeypatch.setattr(cuda_device, "open_device", refuse)
    monkeypatch.setattr(doctor, "nvrtc", lambda: {"compiles": False, "why": "no library"})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "it cannot be used: device=cuda:0: out of memory" in said
    assert "does not work: no library" in said


def test_the_numa_node_of_a_device_that_the_system_does_not_know() -> None:
    assert doctor.numa_node("ffff:ff:ff.0") is None


def test_nothing_of_it_is_asked_of_the_other_benchmarks() -> None:
    parser: Any = argparse.ArgumentParser()
    bench_cuda.add_arguments(parser)
    assert parser.parse_args([]).device == "cuda:0"


@pytest.mark.slow
def test_stress_runs_on_the_device_with_faults_and_cancellations(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: FilePath
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


def test_neighbours_are_submitted_as_merged_runs(simulated_device: Make) -> None:
    device = simulated_device()
    pages = cuda_copies.CopyPools(device, 64 << 12, 4 << 10, layers=1, scattered=False)
    assert pages.rate(device, CopyDirection.OUT, 2) > 0
    assert driver_of(device).calls == {"copy": 3, "spans": 3}
    asyncio.run(device.aclose())
