"""``asynccache doctor`` and ``asynccache bench cuda``: what they say without a GPU, and that every figure is there with
a simulated one. What the figures are on such a driver means nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from asynccache.cli import bench_cuda, cuda_copies, cuda_waking, doctor
from asynccache.cli.main import main
from asynccache.memory.cuda import device as cuda_device
from asynccache.memory.cuda.cupy_driver import Found
from asynccache.memory.cuda.device import CudaDevice
from tests.cuda.conftest import Make

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


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "WIDTHS", (4 << 10, 16 << 10))
    monkeypatch.setattr(cuda_copies, "COUNTS", (4, 64, 50_000))
    monkeypatch.setattr(cuda_waking, "IN_FLIGHT", 20)
    monkeypatch.setattr(cuda_waking, "PAGES", 64)


def test_the_benchmark_measures_everything(simulated_device: Make, small: None) -> None:
    args = argparse.Namespace(device="cuda:0", buffer=4 / 1024, rounds=1, samples=5, every_path=True, quiet=True)
    figures = bench_cuda.measure(simulated_device(), args, compute=lambda *_: {"slow_down": {}, "layer_wise": {}})
    json.dumps(figures)
    rows = figures["copies"]["fragments"]
    assert {(r["direction"], r["width"], r["count"]) for r in rows} == {
        (d, w, n) for d in ("device to host", "host to device") for w in (4096, 16384) for n in (4, 64)
    }
    ways = {r["way"] for r in rows if r["direction"] == "device to host"}
    assert ways == {"chosen", "dma", "pitched", "staged", "kernel"}
    assert all(r["bytes_per_s"] > 0 and r["ratio"] >= 0 for r in rows)
    assert len(figures["copies"]["both_directions"]) == 2
    waking = figures["waking"]
    assert 0 <= waking["wake_up"]["p50_us"] <= waking["wake_up"]["p99_us"]
    assert waking["in_flight"]["loop_us_each"] > 0
    assert waking["submitting"]["on_loop_us"] > 0
    assert waking["submitting"]["off_loop_us"] > 0
    said = bench_cuda.told(figures)
    assert "goal 0.6" in said
    assert "both directions" in said


def test_doctor_tells_what_will_be_used_and_why(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SMALL_BUFFER", 2 << 20)
    monkeypatch.setattr(doctor, "WIDTHS", (4 << 10, 64 << 10))
    found = Found("14.2.0", "13.0", 1, 13000, "")
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device())
    monkeypatch.setattr(doctor, "nvrtc", lambda: {"compiles": True, "bytes": 7000})
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("a simulated GPU", "CUDA 13.0, 1 GPUs", "many in one call", "for one large copy", "wake-up   p50",
                  "will be used (GB/s: dma ", "compiles the copy kernel"):  # fmt: skip
        assert words in said


def test_a_gpu_that_cannot_be_used_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from asynccache.errors import ConfigError

    def refuse(name: str) -> CudaDevice:
        raise ConfigError(f"device={name}: out of memory")

    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: Found("14.2.0", "13.0", 1, 13000, ""))
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
