"""``asynccache doctor`` and ``asynccache bench cuda``: what they say without a GPU, and that every figure is there with
a simulated one. What the figures are on such a driver means nothing."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch

from asynccache.cli import bench_cuda, cuda_compute, cuda_copies, cuda_goals, cuda_leases, cuda_waking, cuda_why, doctor
from asynccache.cli.main import main
from asynccache.memory.cuda import device as cuda_device
from asynccache.memory.cuda.calibration import Bench
from asynccache.memory.cuda.cupy_driver import Found
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver import DriverError, Towards
from asynccache.memory.cuda.events import CudaEvent
from asynccache.memory.cuda.paths import Path, Settings
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
@pytest.mark.parametrize("name", ["cpu", "gpu0"])
def test_what_is_no_gpu_is_refused_before_anything_is_measured(
    command: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--device", name])
    assert f"argument --device: invalid gpu value: '{name}'" in capsys.readouterr().err


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_copies, "WIDTHS", (4 << 10, 16 << 10))
    monkeypatch.setattr(cuda_copies, "BOTH_WIDTHS", (16 << 10,))
    monkeypatch.setattr(cuda_copies, "COUNTS", (4, 64, 512))
    monkeypatch.setattr(cuda_waking, "IN_FLIGHT", 20)
    monkeypatch.setattr(cuda_waking, "PAGES", 64)
    monkeypatch.setattr(cuda_compute, "SIDE", 8)
    monkeypatch.setattr(cuda_compute, "SMALL_SIDE", 8)
    monkeypatch.setattr(cuda_compute, "PRODUCTS", 4)
    monkeypatch.setattr(cuda_compute, "FRAGMENTS", 8)
    monkeypatch.setattr(cuda_compute, "LAYERS", 4)
    monkeypatch.setattr(cuda_compute.layer_wise, "__kwdefaults__", {"page": 1 << 12, "pages": 8})
    for name, value in (("SMALL_SIDE", 8), ("LAYERS", 4), ("PAGES", 8), ("PAGE_BYTES", 1 << 12)):
        monkeypatch.setattr(cuda_leases, name, value)


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


def arguments(**changes: Any) -> argparse.Namespace:
    plain = {"device": "cuda:0", "buffer": 4 / 1024, "rounds": 1, "samples": 5, "every_path": True, "quiet": True}
    return argparse.Namespace(**plain | changes)


def test_the_benchmark_measures_everything_that_was_asked_for_with_its_goal(
    simulated_device: Make, small: None, torch_on: Callable[[SimulatedCuda], None]
) -> None:
    device = simulated_device()
    torch_on(driver_of(device))
    figures = bench_cuda.measure(device, arguments())
    json.dumps(figures)
    rows = figures["copies"]["fragments"]
    assert {(r["direction"], r["width"], r["count"]) for r in rows} == {
        (d, w, n) for d in ("device to host", "host to device") for w in (4096, 16384) for n in (4, 64, 512)
    }
    assert {(r["width"], r["count"]) for r in rows if r["wraps"]} == {(16384, 512)}  # none is left out
    assert {r["way"] for r in rows if r["direction"] == "device to host"} == {
        "chosen", "dma", "pitched", "staged", "kernel"
    }  # fmt: skip
    assert all(r["bytes_per_s"] > 0 and r["to_a_thread"] > 0 for r in rows)
    assert [r["width"] for r in figures["copies"]["both_directions"]] == [16384]
    beside = figures["compute"]["slow_down"]["beside"]
    assert [(r["direction"], r["path"]) for r in beside] == [
        ("device to host", "dma"), ("device to host", "staged"), ("device to host", "kernel"),
        ("host to device", "dma"), ("host to device", "kernel"),
    ]  # fmt: skip
    waking = figures["waking"]
    assert 0 < waking["wake_up"]["p50_us"] <= waking["wake_up"]["p99_us"]
    assert waking["wake_up"]["uncertain_us"] > 0
    assert waking["in_flight"]["loop_us_each"] > 0
    assert [r["way"] for r in waking["submitting"]] == ["chosen", "by the kernel", "in merged runs"]
    assert all(r["on_loop_us"] > 0 and r["off_loop_us"] > 0 for r in waking["submitting"])
    for layers in (figures["compute"]["layer_wise"], figures["leases"]):
        assert layers["ratio"] > 0
        assert layers["load_s"] > 0
    assert figures["leases"]["tokens"] == 8 * 16  # each lease loads its whole prompt
    assert 0 < figures["leases"]["wait_layer"]["p50_us"] <= figures["leases"]["wait_layer"]["max_us"]


ISSUE = [
    "device to host, 64 fragments of 4 KiB: share of one large copy", "both directions, fragments of 16 KiB: GB/s",
    "bf16 products beside copies host to device by dma: slower by",
    "bf16 products beside copies device to host by kernel: slower by", "event to coroutine, p50: µs",
    "event to coroutine, p99: µs", "20 in flight, loop time each: µs", "submitting 64 pages, chosen: µs on the loop",
    "submitting 64 pages, by the kernel: µs off the loop", "submitting 64 pages, in merged runs: µs off the loop",
    "load of 4 layers beside computing, by the device: share of the longer of the two",
    "load of 4 layers beside computing, by leases: share of the longer of the two",
]  # fmt: skip


def test_the_command_tells_every_goal_as_met_or_missed(
    simulated_device: Make, small: None, torch_on: Callable[[SimulatedCuda], None], monkeypatch: pytest.MonkeyPatch,
    tmp_path: FilePath, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    device, path = simulated_device(), tmp_path / "cuda.json"
    torch_on(driver_of(device))
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: device)
    options = ["--buffer", str(4 / 1024), "--rounds", "1", "--samples", "5"]
    assert main(["bench", "cuda", *options, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())
    names = [goal["figure"] for goal in figures["goals"]]
    assert set(ISSUE) <= set(names)
    assert len(names) == len(set(names))
    assert figures["met"] + figures["missed"] == len(names)
    said = capsys.readouterr().err
    for goal in figures["goals"]:
        assert f"{'met   ' if goal['met'] else 'MISSED'}  {goal['figure']}: {goal['value']} ({goal['goal']})" in said
    assert "wait_layer in the caller's thread" in said


@pytest.mark.parametrize(("goal", "met"), [
    (cuda_goals.at_least("a", 0.95, 0.95), True), (cuda_goals.at_least("a", 0.94, 0.95), False),
    (cuda_goals.at_most("a", 80.0, 80.0), True), (cuda_goals.at_most("a", 80.1, 80.0), False),
    (cuda_goals.at_most("a", None, 80.0), False),
])
def test_a_goal_is_met_at_its_limit_and_never_without_a_figure(goal: cuda_goals.Goal, met: bool) -> None:
    assert goal.met is met


def test_what_is_asked_of_both_directions_follows_what_one_makes() -> None:
    both = [{"width": 65536, "gb_s": 70.0}]
    for one, limit, met in ((55.0, 80.0, False), (50.0, 80.0, False), (25.0, 40.0, True)):
        copies = {"fragments": [], "reference_gb_s": {"out": one, "in": one + 1}, "both_directions": both}
        (goal,) = cuda_goals._copies(copies)
        assert (goal.limit, goal.met) == (limit, met)


def test_copies_that_end_before_the_products_are_no_figure(
    simulated_device: Make, small: None, torch_on: Callable[[SimulatedCuda], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they say of the slow-down would be too little."""
    device = simulated_device()
    driver = driver_of(device)
    torch_on(driver)
    bench = Bench(driver, 1 << 20)
    products = cuda_compute.Products(0, 8)
    events: list[CudaEvent] = []
    submit = bench.submit

    def remember(*arguments: Any) -> CudaEvent:
        events.append(submit(*arguments))
        return events[-1]

    def late(count: int) -> float:
        for event in events:
            event.block()
        return 1.0

    monkeypatch.setattr(bench, "submit", remember)
    monkeypatch.setattr(products, "seconds", late)
    row = cuda_compute._beside(bench, Towards.OUT, Path.DMA, products, 1e-6, 1, 8)
    assert row["slower_by"] is None
    bench.close()


@pytest.mark.parametrize(("how", "says"), [
    ({"pinnable": 1 << 20}, "host memory cannot be pinned"),
    ({"break_at": 5}, "bench cuda: the GPU could not be measured: an illegal memory access"),
])
def test_a_bench_that_the_gpu_ends_is_one_sentence(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: Any, says: str
) -> None:
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", lambda: Found("14.2.0", "13.0", 1, 13000, ""))
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device(**how))
    assert main(["bench", "cuda", "--buffer", str(4 / 1024), "--rounds", "1"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def found() -> Found:
    return Found("14.2.0", "13.0", 1, 13000, "", 12090)


def test_doctor_tells_what_will_be_used_and_why(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SMALL_BUFFER", 2 << 20)
    monkeypatch.setattr(doctor, "SIZES", {"small": 4 << 10, "medium": 16 << 10, "large": 64 << 10})
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device())
    monkeypatch.setattr(doctor, "nvrtc", lambda: {"compiles": True, "bytes": 7000})
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("a simulated GPU", "CUDA 13.0, 1 GPUs", "many in one call", "for one large copy", "wake-up   p50",
                  "compiles the copy kernel", "14.2.0, for CUDA 12.9", "for CUDA 13.0",
                  "a driver for CUDA 13 or newer is needed",
                  "pip install 'cupy-cuda13x>=14.0' 'nvidia-cuda-nvrtc>=13,<14'"):  # fmt: skip
        assert words in said
    lines = said.splitlines()
    for direction in ("device to host", "host to device"):
        for size in ("small fragments (4.0 KiB)", "medium fragments (16.0 KiB)", "large fragments (64.0 KiB)"):
            at = next(i for i, line in enumerate(lines) if line.startswith(f"{direction}, {size}: "))
            path = lines[at].removeprefix(f"{direction}, {size}: ").split()[0]
            assert lines[at + 1].strip().startswith(cuda_why.HOW[path] + "; ")


def test_doctor_says_what_was_chosen_by_hand(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SMALL_BUFFER", 1 << 20)
    monkeypatch.setattr(doctor, "SIZES", {"small": 4 << 10})
    monkeypatch.setattr("asynccache.memory.cuda.cupy_driver.find", found)
    monkeypatch.setattr(cuda_device, "open_device", lambda name: simulated_device(settings=Settings(out=Path.KERNEL)))
    assert main(["doctor", "--json"]) == 0
    out, inward = json.loads(capsys.readouterr().out)["paths"]
    assert (out["chosen"], out["forced"], inward["forced"]) == ("kernel", True, False)
    assert out["why"].startswith("the settings say so; ")


@pytest.mark.parametrize(("chosen", "rates", "why"), [
    ("staged", {"dma": 4.0, "staged": 32.0, "kernel": 20.0}, "1.60 times as fast as the next best: kernel makes 20.0"),
    ("dma", {"dma": 48.0, "kernel": 50.0}, "kernel makes 50.0 GB/s, which is not enough more for the multiprocessors"),
    ("kernel", {"dma": 50.0, "kernel": 50.0}, "as fast as any: dma makes 50.0"),
    ("kernel", {"dma": 50.0, "kernel": 30.0}, "estimated to be the fastest when the device opened, yet here dma makes"),
    ("dma", {"dma": 50.0}, "no other path can do it"),
])
def test_the_reason_follows_from_what_was_measured(chosen: str, rates: dict[str, float], why: str) -> None:
    choice = cuda_why.Choice("device to host", "small", 4096, chosen, rates, ("pitched", 40.0), False)
    assert why in choice.why()
    assert "neighbours: pitched will be used, 40.0 GB/s" in "\n".join(choice.told())


@pytest.mark.parametrize("failure", [DriverError("out of memory\nmore of it"), MemoryError()])
def test_a_gpu_that_fails_while_doctor_measures_is_told(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: Exception
) -> None:
    def fail(device: object) -> object:
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


@pytest.mark.asyncio
async def test_neighbours_are_submitted_as_merged_runs(simulated_device: Make, small: None) -> None:
    device = simulated_device()
    pages = cuda_waking.Pages(device, 64, 16 << 10, 4)
    other = cuda_waking._by(device, cuda_waking.MERGED)
    found = await cuda_waking._submitting(other, other.stream("bench"), "in merged runs", pages.run, 3)
    assert found["pages"] == 64
    calls = driver_of(device).calls
    assert (calls["spans"], calls["pitched"]) == (0, 3 * 4), "a call for each layer"
    await other.aclose()
    await device.aclose()
