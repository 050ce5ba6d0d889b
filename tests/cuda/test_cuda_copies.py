"""Bytes on every path, merged runs, and the choice between paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch

from asynccache.core.plan import Move
from asynccache.errors import ConfigError
from asynccache.memory.cuda import choosing_paths, kernels, pinned
from asynccache.memory.cuda.choosing_paths import RowCopies, RowPaths, RowSide
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.kernels import Table
from asynccache.memory.cuda.libcuda import Spans
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.device import CopyDirection
from asynccache.memory.pools import Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import DMA, KERNEL, driver_of
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool

OUT, IN, _ = CopyDirection


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.intp)


def random_move(rng: np.random.Generator, src: int, dst: int) -> tuple[Move, dict[int, int]]:
    """Some runs of neighbours and some single pages."""
    count = int(rng.integers(1, min(src, dst)))
    a, b = rng.permutation(src)[:count], rng.permutation(dst)[:count]
    if rng.random() < 0.7:
        start = int(rng.integers(0, min(src, dst) - count + 1))
        a = b = np.arange(start, start + count)
    return Move(0, a.astype("<i4").tobytes(), b.astype("<i4").tobytes()), dict(zip(b.tolist(), a.tolist(), strict=True))


async def every_byte_arrives(mover: Mover, rng: np.random.Generator) -> None:
    """Random pages are backed up, loaded, and copied on the device."""
    out, took = random_move(rng, 32, 48)
    await mover.backup([out]).wait()
    assert all(host_page(mover, "full", to) == device_page(mover, "full", of) for to, of in took.items())
    inward, took = random_move(rng, 48, 32)
    await mover.load([inward]).done.wait()
    assert all(device_page(mover, "full", to) == host_page(mover, "full", of) for to, of in took.items())
    before = {s: device_page(mover, "full", s) for s in range(16)}
    pages = rng.permutation(16)[:5]
    await mover.clone([Move(0, pages.astype("<i4").tobytes(), (pages + 16).astype("<i4").tobytes())]).wait()
    assert all(device_page(mover, "full", int(p) + 16) == before[int(p)] for p in pages)


BOTH = CudaSettings(kernel_loads_below=100, kernel_backups_below=100)
SOME = CudaSettings(kernel_loads_below=129, kernel_backups_below=129)
WAYS = {"copy engines": DMA, "kernel": KERNEL, "both": BOTH, "as it comes": CudaSettings()}


@pytest.mark.parametrize(("size", "layers", "align"), [(64, 4, 1), (96, 1, 1), (100, 5, 1), (128, 2, 4096)])
@pytest.mark.parametrize("way", WAYS)
async def test_every_path_brings_every_byte(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, way: str, size: int, layers: int, align: int
) -> None:
    monkeypatch.setattr(choosing_paths, "GROUP", 7)
    monkeypatch.setattr(choosing_paths, "FEW", 1)
    monkeypatch.setattr(choosing_paths, "LAYERS", 3)  # so that a batch takes several launches
    monkeypatch.setattr(choosing_paths, "PAGES", 5)
    device = simulated_device(settings=WAYS[way])
    mover, rng = Mover(device, [pool(size=size, layers=layers)], host_align=align), np.random.default_rng(size)
    fill_device(mover)
    for _ in range(6):
        await every_byte_arrives(mover, rng)
    await device.aclose()
    calls, aligned = driver_of(device).calls, size // layers % 16 == 0
    assert bool(calls["launch"]) == (aligned and way != "copy engines")
    assert way in ("both", "as it comes") or bool(calls["copy"]) == (not aligned or way == "copy engines")


async def test_a_launch_takes_as_many_layers_and_pages_as_its_parameters_hold(simulated_device: Make) -> None:
    device = simulated_device(settings=KERNEL)
    layers, pages = kernels.LAYERS + 1, kernels.PAGES + 1
    mover = Mover(device, [pool(size=16 * layers, layers=layers, device_pages=pages, host_pages=pages)])
    fill_device(mover)
    backwards = list(range(pages))[::-1]
    await mover.backup([move(list(range(pages)), backwards)]).wait()
    assert driver_of(device).calls == {"launch": 2 * 2}
    assert all(host_page(mover, "full", backwards[i]) == device_page(mover, "full", i) for i in (0, 1, pages - 1))
    await device.aclose()


async def test_the_engines_tensors_may_have_any_dtype(simulated_device: Make) -> None:
    device = simulated_device()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float16):
        mine = [device.device_tensor((32, 16)).view(dtype) for _ in range(2)]
        mover = Mover(device, [pool(size=32, layers=2)], device_tensors={"full": mine})
        fill_device(mover)
        wanted = device_page(mover, "full", 8)
        await mover.backup([move([8], [1])]).wait()
        await mover.load([move([1], [9])]).done.wait()
        assert b"".join(t[9].view(torch.uint8).numpy().tobytes() for t in mine) == wanted
    await device.aclose()


# merging


def rows(dst: np.ndarray, src: np.ndarray, *, layers: int = 1, dst_pitch: int = 64, src_pitch: int = 64) -> RowCopies:
    to, of = (np.array([side << 30 | i << 16 for i in range(layers)], np.uint64) for side in (1, 2))
    return RowCopies(OUT, RowSide(to, dst, dst_pitch), RowSide(of, src, src_pitch), 64)


class Written(SimulatedCuda):
    """Writes down where each byte of 64 would come from, and copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: dict[int, int] = {}
        self.launched = 0

    def copy(self, stream: int, towards: CopyDirection, spans: Spans) -> int:
        for dst, src, size in zip(*(array.tolist() for array in spans), strict=True):
            self.note(dst, src, size)
        return 1

    def launch(self, stream: int, table: Table, blocks: int) -> int:
        self.launched += 1
        for layer in range(int(table["layers"])):
            for page in range(int(table["pages"])):
                at = [int(table[f"{side}_ids"][page]) * int(table[f"{side}_pitch"]) for side in ("dst", "src")]
                bases = [int(table[f"{side}_bases"][layer]) for side in ("dst", "src")]
                self.note(bases[0] + at[0], bases[1] + at[1], int(table["width"]))
        return 1

    def note(self, dst: int, src: int, size: int) -> None:
        for i in range(0, size, 64):
            assert dst + i not in self.moved, "twice"
            self.moved[dst + i] = src + i


def test_neighbours_on_both_sides_are_one_piece() -> None:
    found = RowPaths(rows(ids(0, 1, 2, 7, 8, 5), ids(3, 4, 5, 6, 7, 9)), DMA, 1)
    assert found.spans.size.tolist() == [192, 128, 64]
    assert found.spans.src.tolist() == [3 * 64, 6 * 64, 9 * 64]
    assert found.scattered.tolist() == []


def test_rows_at_a_distance_are_pieces_of_their_own() -> None:
    found = RowPaths(rows(ids(0, 1, 2, 3, 9), ids(4, 5, 6, 7, 0), layers=2, dst_pitch=128), DMA, 2)
    assert found.spans.size.tolist() == [64] * 5


def test_merging_moves_what_was_asked_for(drivers: list[SimulatedCuda]) -> None:
    rng = np.random.default_rng(5)
    for layers, distance, settings in product((1, 3), (64, 192), (DMA, SOME, KERNEL)):
        for _ in range(20):
            count = int(rng.integers(8, 40))
            dst, src = (np.sort(rng.permutation(64)[:count]).astype(np.intp) for _ in range(2))
            r = rows(dst, src, layers=layers, dst_pitch=distance)
            driver = Written()
            drivers.append(driver)
            for call in RowPaths(r, settings, layers).calls(driver, 7):
                call()
            assert driver.moved == {
                int(b) + int(i) * distance: int(c) + int(j) * 64
                for b, c in zip(r.dst.bases, r.src.bases, strict=True) for i, j in zip(dst, src, strict=True)
            }  # fmt: skip
            assert driver.launched <= (settings is not DMA)


# registrations


class Strict(SimulatedCuda):
    """Refuses a copy whose side on the host lies in two registrations, as the real driver does."""

    def copy(self, stream: int, towards: CopyDirection, spans: Spans) -> int:
        host = spans.dst if towards is OUT else spans.src
        for start, size in zip(host.tolist(), spans.size.tolist(), strict=True):
            self.whole(start, start + size)
        return super().copy(stream, towards, spans)

    def whole(self, start: int, stop: int) -> None:
        if not any(a <= start and stop <= a + n for a, n in self.pinned.items()):
            self.problems.append("a copy lies in two registrations")


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("settings", [DMA, KERNEL], ids=["copy engines", "kernel"])
async def test_no_piece_lies_in_two_registrations(
    drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch, settings: CudaSettings, layers: int
) -> None:
    """Pages of 3 KiB, pinned 8 at a time, in runs that go across several edges."""
    monkeypatch.setattr(pinned, "CHUNK", 30 << 10)
    drivers.append(Strict())
    device = CudaDevice(drivers[-1], settings=settings)
    mover = Mover(device, [pool(size=3 << 10, layers=layers)])
    assert sorted(drivers[-1].pinned.values()) == [24 << 10] * 6
    fill_device(mover)
    pages = list(range(29))
    await mover.backup([move(pages, [p + 3 for p in pages])]).wait()
    assert all(host_page(mover, "full", p + 3) == device_page(mover, "full", p) for p in pages)
    await mover.load([move([p + 3 for p in pages], [p + 1 for p in pages])]).done.wait()
    assert all(host_page(mover, "full", p + 3) == device_page(mover, "full", p + 1) for p in pages)
    await device.aclose()


def test_runs_end_where_a_registration_ends() -> None:
    here, there, base = np.arange(5, 21), np.arange(8, 24), np.zeros(1, np.uint64)
    for chunk, wanted in ((8, [3, 8, 5]), (0, [16])):
        host, device = RowSide(base, here, 64, chunk), RowSide(base, there, 64)
        for dst, src in ((host, device), (device, host)):
            assert RowCopies(OUT, dst, src, 64).runs()[1].tolist() == wanted


# choosing


def plan(
    width: int, runs: Sequence[int], *, layers: int = 1, odd: int = 0, settings: CudaSettings | None = None,
    towards: CopyDirection = IN,
) -> RowPaths:
    """Runs of so many rows of ``width`` bytes each."""
    src = np.arange(sum(runs))
    dst = np.concatenate([np.arange(n) + 2 * at for n, at in zip(runs, np.cumsum([0, *runs[:-1]]), strict=True)])
    base = np.full(layers, odd, np.uint64)
    one = RowCopies(towards, RowSide(base, dst, width), RowSide(base, src, width), width)
    return RowPaths(one, settings or CudaSettings(), layers)


def test_long_runs_go_by_the_copy_engines_and_scattered_pages_by_the_kernel() -> None:
    found = plan(4 << 10, [1] * 40 + [8, 7, 20])
    assert found.spans.size.tolist() == [32 << 10, 80 << 10], "a run decides for itself"
    assert len(found.scattered) == 40 + 7
    assert len(plan(2 << 20, [1] * 64).spans.size) == 64
    assert len(plan(4 << 10, [1] * 40, odd=8).spans.size) == 40, "the kernel moves 16 bytes at a time"


def test_a_few_short_pieces_are_not_worth_a_launch() -> None:
    few = choosing_paths.FEW - 1
    assert len(plan(4 << 10, [1] * few).scattered) == 0
    assert len(plan(4 << 10, [1] * few, layers=2).scattered) == few, "layers that go in one step count together"
    assert len(plan(4 << 10, [1] * (few + 1)).scattered) == few + 1


def test_where_the_paths_part_can_be_chosen() -> None:
    """For loads and copies within the device by one setting, and for backups by another."""
    for below, scattered in ((0, 0), (4 << 10, 0), ((4 << 10) + 1, 40), (1 << 62, 40)):
        for settings, loads, backups in (
            (CudaSettings(kernel_loads_below=below, kernel_backups_below=0), scattered, 0),
            (CudaSettings(kernel_loads_below=0, kernel_backups_below=below), 0, scattered),
        ):  # fmt: skip
            for towards, expected in ((IN, loads), (CopyDirection.WITHIN, loads), (CopyDirection.OUT, backups)):
                found = plan(4 << 10, [1] * 40, settings=settings, towards=towards)
                assert len(found.scattered) == expected


def test_backups_take_no_multiprocessors_unless_they_are_told_to() -> None:
    """Kernels that write to the host beside FlashAttention 3 made it access illegal memory, in another cache."""
    assert len(plan(64, [1] * 400, towards=CopyDirection.OUT).scattered) == 0


WRONG = [{"blocks": 0}, {"blocks": 1025}, {"blocks": 1.5}, {"kernel_loads_below": -1}, {"kernel_backups_below": -1}]


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CudaSettings(**wrong)  # type: ignore[arg-type]


async def test_the_kernel_takes_as_many_blocks_as_it_may(drivers: list[SimulatedCuda]) -> None:
    taken: list[int] = []

    class Counting(SimulatedCuda):
        def launch(self, stream: int, table: Table, blocks: int) -> int:
            taken.append(blocks)
            return super().launch(stream, table, blocks)

    drivers.append(Counting())
    device = CudaDevice(drivers[-1], settings=CudaSettings(blocks=13))
    mover = Mover(device, [pool(device_pages=128, host_pages=128)])
    await mover.load([move(list(range(0, 80, 2)), list(range(40)))]).done.wait()
    assert taken == [13] * mover.layers
    taken.clear()
    await mover.clone([move(list(range(0, 80, 2)), list(range(1, 81, 2)))]).wait()
    assert set(taken) == {choosing_paths.BLOCKS_WITHIN}, "within the device memory is much faster"
    await device.aclose()
