"""``asynccache doctor`` and ``stress``: their output without a GPU, and with a simulated one. Figures on such a driver
mean nothing."""

from __future__ import annotations

import json
from pathlib import Path as FilePath

import pytest
import torch

from asynccache.cli import doctor
from asynccache.cli.main import main
from asynccache.memory.cuda import device as cuda_device
from asynccache.memory.cuda.cupy_driver import FoundCuda
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.libcuda import DriverError
from asynccache.memory.cuda.settings import CudaSettings
from tests.cuda.conftest import Make
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
        assert report["copies"][path]["device to host"] > 0
        assert report["copies"][path]["host to device"] > 0
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
    def no_library(capability: object) -> bytes:
        raise RuntimeError("no library\nof that name")

    monkeypatch.setattr("asynccache.memory.cuda.kernels.compile_for", no_library)
    assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "it cannot be used: device=cuda:0: out of memory" in said
    assert "does not work: no library" in said


def test_the_numa_node_of_a_device_that_the_system_does_not_know() -> None:
    assert doctor.numa_node("ffff:ff:ff.0") is None


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
