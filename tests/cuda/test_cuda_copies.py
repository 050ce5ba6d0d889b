"""Bytes on every path, merged runs, and the choice between paths."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.core.plan import Move
from asynccache.errors import ConfigError
from asynccache.memory.cuda import calibration, pinned, scratch, submission
from asynccache.memory.cuda.device import CudaDevice
from asynccache.memory.cuda.driver import Launch, Pitched, Spans, Towards
from asynccache.memory.cuda.paths import PUBLISHED, Chooser, Cost, Path, Settings, Shape
from asynccache.memory.cuda.rows import Rows, Runs, merged
from asynccache.memory.cuda.submission import shape_of
from asynccache.memory.mover import Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import driver_of, submitted
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool

OUT, IN, WITHIN = Towards


class Counting(SimulatedCuda):
    """``tables``: where each launch has its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[int] = []

    def host_register(self, address: int, size: int) -> None:
        self.calls["host_register"] += 1
        super().host_register(address, size)

    def malloc(self, size: int) -> int:
        self.calls["malloc"] += 1
        return super().malloc(size)

    def free(self, address: int) -> None:
        self.calls["free"] += 1
        super().free(address)

    def launch(self, stream: int, launch: Launch) -> None:
        self.tables.append(launch.dst_bases)
        super().launch(stream, launch)


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


WAYS = [
    Settings(out=out, inward=inward, within=within)
    for out, inward, within in (
        (Path.DMA, Path.DMA, Path.DMA), (Path.PITCHED, Path.PITCHED, Path.DMA),
        (Path.KERNEL, Path.KERNEL, Path.KERNEL), (Path.STAGED, Path.KERNEL, Path.KERNEL), (None, None, None),
    )
]  # fmt: skip


@pytest.mark.asyncio
@pytest.mark.parametrize(("size", "layers", "align"), [(64, 4, 1), (96, 1, 1), (100, 5, 1), (128, 2, 4096)])
@pytest.mark.parametrize("settings", WAYS, ids=lambda s: f"{s.out and s.out.value}-{s.inward and s.inward.value}")
async def test_every_path_brings_every_byte(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, settings: Settings, size: int, layers: int, align: int
) -> None:
    monkeypatch.setattr(submission, "STAGING_BYTES", 5 * size)  # so that staging takes several rounds
    monkeypatch.setattr(submission, "GROUP", 7)
    device = simulated_device(settings=settings)
    mover, rng = Mover(device, [pool(size=size, layers=layers)], host_align=align), np.random.default_rng(size)
    fill_device(mover)
    for _ in range(6):
        await every_byte_arrives(mover, rng)
    await device.aclose()
    calls = driver_of(device).calls
    aligned = size // layers % 16 == 0
    assert settings.out is None or bool(calls["launch"]) == (aligned and settings.out in (Path.KERNEL, Path.STAGED))


@pytest.mark.asyncio
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


def rows(dst: np.ndarray, src: np.ndarray, *, layers: int = 1, dst_pitch: int = 64, src_pitch: int = 64) -> Rows:
    bases = tuple((1 << 20 | i << 8, 2 << 20 | i << 8) for i in range(layers))
    return Rows(OUT, bases, dst, src, dst_pitch, src_pitch, 64)


def test_neighbours_on_both_sides_are_one_piece() -> None:
    r = rows(ids(0, 1, 2, 7, 8, 5), ids(3, 4, 5, 6, 7, 9))
    found = merged(r, Runs.of(r), pitched=True)
    spans = found.spans
    assert spans.size.tolist() == [192, 128, 64]
    assert [int(s) - (2 << 20) for s in spans.src] == [3 * 64, 6 * 64, 9 * 64]
    assert found.calls(r) == []
    assert Runs.of(r).pieces(r, pitched=False) == Runs.of(r).pieces(r, pitched=True) == 3


def test_rows_at_a_distance_are_pitched_or_single() -> None:
    r = rows(ids(0, 1, 2, 3, 9), ids(4, 5, 6, 7, 0), layers=2, dst_pitch=128)
    runs = Runs.of(r)
    found = merged(r, runs, pitched=True)
    spans, pitched = found.spans, found.calls(r)
    assert len(spans.size) == 2  # the page that is alone, in both layers
    assert [(p.height, p.width, p.dst_pitch, p.src_pitch) for p in pitched] == [(4, 64, 128, 64)] * 2
    assert len(spans.size) + len(pitched) == runs.pieces(r, pitched=True)
    alone = merged(r, runs, pitched=False)
    assert len(alone.spans.size) == 10 == runs.pieces(r, pitched=False)
    assert alone.calls(r) == []


def test_merging_moves_what_was_asked_for() -> None:
    rng = np.random.default_rng(5)
    for layers, distance, pitched in product((1, 3), (64, 192), (False, True)):
        for _ in range(20):
            count = int(rng.integers(1, 30))
            dst, src = (np.sort(rng.permutation(64)[:count]).astype(np.intp) for _ in range(2))
            r = rows(dst, src, layers=layers, dst_pitch=distance)
            found = merged(r, Runs.of(r), pitched=pitched)
            moved: dict[int, int] = {}
            for d, s, n in zip(*(a.tolist() for a in found.spans), strict=True):
                moved |= {d + i: s + i for i in range(0, n, 64)}
            for one in found.calls(r):
                moved |= {one.dst + i * one.dst_pitch: one.src + i * one.src_pitch for i in range(one.height)}
            assert moved == {b[0] + int(i) * distance: b[1] + int(j) * 64
                             for b in r.bases for i, j in zip(dst, src, strict=True)}  # fmt: skip


@pytest.mark.asyncio
async def test_staged_pages_take_one_upload_a_launch_a_round_and_a_copy_a_round(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "STAGING_BYTES", 10 * 64)
    device = simulated_device(settings=Settings(out=Path.STAGED))
    mover = Mover(device, [pool(size=64, layers=4)])
    await mover.backup([move(list(range(30)), list(range(46, 16, -1)))]).wait()
    assert driver_of(device).calls == {"copy": 1 + 3, "spans": 1 + 30, "launch": 3}
    await device.aclose()


# registrations


class Strict(SimulatedCuda):
    """Refuses a copy whose side on the host lies in two registrations, as the real driver does."""

    def copy(self, stream: int, towards: Towards, spans: Spans) -> int:
        host = spans.dst if towards is OUT else spans.src
        for start, size in zip(host.tolist(), spans.size.tolist(), strict=True):
            self.whole(start, start + size)
        return super().copy(stream, towards, spans)

    def copy_pitched(self, stream: int, towards: Towards, rows: Pitched) -> None:
        start, pitch = (rows.dst, rows.dst_pitch) if towards is OUT else (rows.src, rows.src_pitch)
        self.whole(start, start + (rows.height - 1) * pitch + rows.width)
        super().copy_pitched(stream, towards, rows)

    def whole(self, start: int, stop: int) -> None:
        if not any(a <= start and stop <= a + n for a, n in self.pinned.items()):
            self.problems.append("a copy lies in two registrations")


@pytest.mark.asyncio
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("out", "inward"), [(Path.DMA, Path.DMA), (Path.PITCHED, Path.PITCHED),
                                             (Path.STAGED, Path.KERNEL)])  # fmt: skip
async def test_no_piece_lies_in_two_registrations(
    drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch, out: Path, inward: Path, layers: int
) -> None:
    """Pages of 3 KiB, pinned 8 at a time, in runs that go across several edges."""
    monkeypatch.setattr(pinned, "CHUNK", 30 << 10)
    drivers.append(Strict())
    device = CudaDevice(drivers[-1], settings=Settings(out=out, inward=inward))
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
    numbers = np.arange(5, 21)
    for towards, other in ((OUT, 3), (IN, 3)):
        dst, src = (numbers, numbers + other) if towards is OUT else (numbers + other, numbers)
        r = Rows(towards, ((0, 0),), dst, src, 64, 64, 64, 8)
        assert Runs.of(r).lengths.tolist() == [3, 8, 5]
        assert Runs.of(r._replace(chunk_pages=0)).lengths.tolist() == [16]


# choosing


def shape(
    towards: Towards, width: int, count: int, *, aligned: bool = True, spans: int | None = None, layers: int = 1
) -> Shape:
    """Rows of pages that are no neighbours."""
    spans = count if spans is None else spans
    return Shape(towards, count, width * count, aligned, spans, spans, count // layers if towards is OUT else 0)


@pytest.mark.parametrize("towards", [OUT, IN])
def test_small_fragments_go_by_the_kernel_and_large_or_merged_ones_by_the_copy_engines(towards: Towards) -> None:
    chooser = Chooser()
    assert chooser.choose(shape(towards, 4 << 10, 8192)) is Path.KERNEL
    assert chooser.choose(shape(towards, 2 << 20, 64)) is Path.DMA
    assert chooser.choose(shape(towards, 4 << 10, 8192, spans=8)) is Path.DMA
    assert chooser.choose(shape(towards, 4 << 10, 4)) is Path.DMA  # too few for a launch to pay
    assert chooser.choose(shape(towards, 4 << 10, 8192, aligned=False)) is Path.DMA


def test_the_choice_follows_what_was_measured() -> None:
    slow = dict(PUBLISHED) | {(IN, Path.KERNEL): Cost(1.0, 1.0, 1.0, 1.0)}
    assert Chooser(costs=slow).choose(shape(IN, 4 << 10, 8192)) is Path.DMA


def test_pages_are_put_together_on_the_device_only_where_that_saves_descriptors() -> None:
    """One for each page of the host instead of one for each layer of it: nothing with one layer, much with many."""
    costs = dict(PUBLISHED) | {(OUT, Path.KERNEL): Cost(1.0, 0, 0, 0)}  # out of the way
    assert Chooser(costs=costs).choose(shape(OUT, 4 << 10, 8192, layers=1)) is Path.DMA
    assert Chooser(costs=costs).choose(shape(OUT, 4 << 10, 8192, layers=32)) is Path.STAGED


@pytest.mark.parametrize("pitch", [4, 5])
def test_staged_pages_are_counted_as_they_are_copied(pitch: int) -> None:
    """Neighbours of the host are one descriptor each, wherever they come from."""
    rng = np.random.default_rng(1)
    dst, src = np.r_[8:28, 40, 50].astype(np.intp), rng.permutation(22)
    bases = tuple((1 << 20 | i << 6, 2 << 20 | i << 12) for i in range(4))
    r = Rows(OUT, bases, dst, src, pitch * 64, 64, 64)
    assert shape_of(r, Runs.of(r)).staged == 3
    assert shape_of(r._replace(towards=IN), Runs.of(r)).staged == 0


def test_a_path_can_be_forced_where_it_is_possible() -> None:
    chooser = Chooser(Settings(out=Path.STAGED, inward=Path.KERNEL))
    assert chooser.choose(shape(OUT, 2 << 20, 64)) is Path.STAGED
    assert chooser.choose(shape(IN, 2 << 20, 64, aligned=False)) is Path.DMA


@pytest.mark.parametrize("wrong", [{"blocks": 0}, {"inward": Path.STAGED}, {"within": Path.PITCHED}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_kernel_tables_are_used_again_only_when_the_device_has_read_them(
    drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many launches in flight: each has tables of its own until it is over, and later ones take them over."""
    monkeypatch.setattr(scratch, "SLAB", 8 * scratch.SMALLEST)
    driver = Counting()
    drivers.append(driver)
    device = CudaDevice(driver, settings=Settings(out=Path.KERNEL))
    mover = Mover(device, [pool()])
    fill_device(mover)
    driver.pause()
    events = [mover.backup([move([i], [i])]) for i in range(20)]
    submitted(events[-1])
    assert len(driver.tables) == len(set(driver.tables)) == 20
    driver.resume()
    await asyncio.gather(*(e.wait() for e in events))
    assert [host_page(mover, "full", s) for s in range(20)] == [device_page(mover, "full", s) for s in range(20)]
    for i in range(20):
        await mover.backup([move([i], [i])]).wait()
    assert len(set(driver.tables)) <= 21
    assert driver.calls["host_register"] == 1 + 3  # the pool, and 20 tables in slabs of 8
    await device.aclose()
    assert driver.calls["free"] == driver.calls["malloc"] == 3


@pytest.mark.asyncio
async def test_many_kernel_batches_in_flight_pin_and_allocate_a_few_times(drivers: list[SimulatedCuda]) -> None:
    driver = Counting()
    drivers.append(driver)
    device = CudaDevice(driver, settings=Settings(out=Path.KERNEL))
    mover = Mover(device, [pool()])
    driver.pause()
    events = [mover.backup([move([i % 32], [i % 48])]) for i in range(80)]  # as many as the driver's queue is given
    submitted(events[-1])
    assert len(set(driver.tables)) == 80
    assert driver.calls["host_register"] == 2
    assert driver.calls["malloc"] == 1
    driver.resume()
    await events[-1].wait()
    await device.aclose()


def test_a_table_that_is_larger_than_a_slab_has_memory_of_its_own(drivers: list[SimulatedCuda]) -> None:
    drivers.append(SimulatedCuda())
    small = scratch.Scratch(drivers[-1])
    first, large, second = small.take(100), small.take(scratch.SLAB + 1), small.take(100)
    assert len(large.array) == 2 * scratch.SLAB
    assert second.host - first.host == second.device - first.device == scratch.SMALLEST
    small.close()


# calibration


class Priced(SimulatedCuda):
    """A driver whose calls take what they cost, by a clock that only they move; looking at it takes ``WAKING``."""

    WAKING, LAUNCH, PIECE, ROW, KERNEL_ROW, BYTE = 80e-6, 12e-6, 1e-6, 0.25e-6, 0.02e-6, 1 / 50e9

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.blocks: set[int] = set()

    def clock(self) -> float:
        self.now += self.WAKING
        return self.now

    def copy(self, stream: int, towards: Towards, spans: Spans) -> Any:
        self.now += len(spans.size) * self.PIECE + int(spans.size.sum()) * self.BYTE
        return super().copy(stream, towards, spans)

    def copy_pitched(self, stream: int, towards: Towards, rows: Pitched) -> None:
        self.now += self.PIECE + rows.height * self.ROW + rows.height * rows.width * self.BYTE
        super().copy_pitched(stream, towards, rows)

    def launch(self, stream: int, launch: Launch) -> None:
        rows = launch.layers * launch.pages
        self.now += self.LAUNCH + rows * self.KERNEL_ROW + rows * launch.width * self.BYTE
        self.blocks.add(launch.blocks)
        super().launch(stream, launch)


@pytest.mark.slow(1)
def test_calibration_finds_what_each_thing_costs(
    drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waking up is in none of it, and the kernel has the blocks that it will have."""
    driver = Priced()
    drivers.append(driver)
    monkeypatch.setattr(calibration, "perf_counter", driver.clock)
    monkeypatch.setattr(calibration, "LARGE", 128 << 10)
    costs = calibration.calibrate(driver, blocks=13, size=2 << 20)
    dma = Cost(0, driver.PIECE, 0, driver.BYTE)
    # The tables of a kernel are a descriptor, and some bytes a page.
    kernel = Cost(driver.LAUNCH + driver.PIECE, 0, driver.KERNEL_ROW, driver.BYTE)
    staged = Cost(driver.LAUNCH + driver.PIECE, driver.PIECE, driver.KERNEL_ROW, 2 * driver.BYTE)
    pitched = Cost(0, driver.PIECE, driver.ROW, driver.BYTE)
    expected = {Path.DMA: dma, Path.KERNEL: kernel, Path.STAGED: staged, Path.PITCHED: pitched}
    for (_, path), cost in costs.items():
        assert cost == pytest.approx(expected[path], rel=0.05, abs=1e-12), path
    assert driver.blocks == {13}


def test_costs_are_never_negative_and_noise_moves_them_little() -> None:
    counts = [(1, 1, 4 << 10), (32, 32, 32 << 20), (8192, 8192, 32 << 20), (256, 8192, 32 << 20)]
    true, rng = Cost(20e-6, 0.9e-6, 0, 1 / 50e9), np.random.default_rng(3)
    for _ in range(50):
        found = calibration.fit(counts, [true.of(*c) * rng.uniform(0.95, 1.05) for c in counts])
        assert min(found) >= 0
        assert all(found.of(*c) == pytest.approx(true.of(*c), rel=0.12) for c in counts)
