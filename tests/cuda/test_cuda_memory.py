"""Bytes on every path: merged runs, pinned host memory, the choice between paths."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynccache.config import PoolSpec
from asynccache.core.plan import Move
from asynccache.errors import ConfigError
from asynccache.memory.cuda import choosing_paths, pinned
from asynccache.memory.cuda.choosing_paths import RowCopies, RowPaths, RowSide
from asynccache.memory.cuda.pinned import pinned_tensor
from asynccache.memory.cuda.settings import CudaSettings
from asynccache.memory.device import CopyDirection
from asynccache.memory.mover import Mover
from asynccache.memory.pools import BLOCK
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import DMA, KERNEL, driver_of
from tests.cuda.simulated_cuda import Piece, SimulatedCuda
from tests.memory.small_pools import device_page, fill_device, host_page, move, pool

# Pinned host memory: exact, in chunks, unpinned before it is unmapped; and room that is checked first.


MIB = 1 << 20


@pytest.fixture
def driver(drivers: list[SimulatedCuda]) -> SimulatedCuda:
    drivers.append(SimulatedCuda(pinnable=64 * MIB))
    return drivers[-1]


@pytest.mark.parametrize("shape", [(3, 4096), (1, 5), (1000, 4097)])
def test_exactly_as_much_as_was_asked_for_is_pinned(driver: SimulatedCuda, shape: tuple[int, ...]) -> None:
    tensor = pinned_tensor(driver, shape)
    assert driver.pinned == {tensor.data_ptr(): shape[0] * shape[1]}
    assert tensor.data_ptr() % BLOCK == 0
    assert tuple(tensor.shape) == shape
    assert tensor.dtype == torch.uint8
    assert not tensor.any()
    del tensor
    gc.collect()
    assert driver.pinned == {}


def test_large_memory_is_pinned_in_chunks_and_touched_in_parts(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "TOUCH", MIB)
    monkeypatch.setattr(pinned, "CHUNK", 4 * MIB)
    tensor = pinned_tensor(driver, (10 * MIB + 7,))
    start = tensor.data_ptr()
    assert driver.pinned == {start: 4 * MIB, start + 4 * MIB: 4 * MIB, start + 8 * MIB: 2 * MIB + 7}
    view = tensor[3:9]
    del tensor
    gc.collect()
    assert len(driver.pinned) == 3  # a view is enough to keep it
    del view
    gc.collect()
    assert driver.pinned == {}


@pytest.mark.parametrize(("stride", "chunk"), [
    (4096, 4 * MIB), (5, 4 * MIB // 20480 * 20480), (3 << 10, 4 * MIB // 12288 * 12288), (5 * MIB, 5 * MIB),
    (5 * MIB + 1, (5 * MIB + 1) * 4096),  # a strange page is worth a larger registration
])  # fmt: skip
def test_a_registration_ends_with_a_page_of_the_pool(
    monkeypatch: pytest.MonkeyPatch, stride: int, chunk: int
) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 4 * MIB)
    assert pinned.chunk_of(stride) == chunk
    assert chunk % stride == chunk % BLOCK == 0


def test_memory_that_cannot_be_pinned_whole_is_not_kept(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "CHUNK", 30 * MIB)
    with pytest.raises(ConfigError, match=r"0\.12 GiB of host memory cannot be pinned: out of memory; .*doctor"):
        pinned_tensor(driver, (128 * MIB,))
    gc.collect()
    assert driver.pinned == {}


def test_a_forked_child_does_not_get_the_memory_and_leaves_it_to_its_parent(driver: SimulatedCuda) -> None:
    """Linux would copy all that is pinned for the child. And the end of the child's object must not unmap what the
    child may have at that address by then."""
    tensor = pinned_tensor(driver, (4 * MIB,))
    start = tensor.data_ptr()
    assert "dc" in flags_of(start), "don't copy on fork"
    seen, told = os.pipe()
    child = os.fork()
    if not child:  # nothing of the parent's but this: its threads are not here
        try:
            import mmap

            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            anonymous, fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10
            own = libc.mmap(ctypes.c_void_p(start), ctypes.c_size_t(4 * MIB), 3, anonymous | fixed, -1, 0)
            ctypes.memset(own, 5, 4 * MIB)
            del tensor
            gc.collect()
            untouched = ctypes.string_at(start, 1) == bytes([5])
            pinned._OF_PARENTS[0].__del__()  # as at the child's exit
            os.write(told, b"well" if untouched and driver.pinned else b"lost")
        finally:
            os._exit(0)
    assert os.read(seen, 4) == b"well"
    assert os.waitpid(child, 0)[1] == 0
    os.close(seen)
    os.close(told)
    assert driver.pinned == {start: 4 * MIB}


def test_where_registered_memory_has_another_address_the_driver_allocates(driver: SimulatedCuda) -> None:
    """WSL2."""
    driver.registers = False
    tensor = pinned_tensor(driver, (3, 5000))
    assert driver.pinned == {tensor.data_ptr(): 15000}
    assert not tensor.any()
    part = tensor[1]
    del tensor
    gc.collect()
    assert len(driver.pinned) == 1
    del part
    gc.collect()
    assert driver.pinned == {}
    with pytest.raises(ConfigError, match=r"0\.12 GiB of host memory cannot be pinned: out of memory; .*doctor"):
        pinned_tensor(driver, (128 * MIB,))


def test_memory_of_the_drivers_is_not_freed_at_the_end_of_the_process_while_a_tensor_has_it() -> None:
    """Threads that nobody joins may write to it until the process is gone, and the system frees it then."""
    code = """
from asynccache.memory.cuda.pinned import pinned_tensor
from tests.cuda.simulated_cuda import Piece, SimulatedCuda
driver = SimulatedCuda()
driver.registers = False
driver.host_free = lambda address: print("freed")
tensor = pinned_tensor(driver, (3, 5000))
print("made")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "made\n"


def test_memory_is_touched_on_the_node_of_the_device(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "0000:1a:00.0").mkdir()
    listed = tmp_path / "0000:1a:00.0" / "local_cpulist"
    monkeypatch.setattr(pinned, "Path", lambda path: Path(path.replace("/sys/bus/pci/devices", str(tmp_path))))
    mine, touch, seen = os.sched_getaffinity(0), pinned._touch_part, list[set[int]]()
    one = min(mine)
    for text, near in ((f"{one}-{one}\n", {one}), (f"100000,{one}", {one}), ("100000-100003", mine), ("?", mine)):
        listed.write_text(text)
        assert pinned.cpus_near("0000:1A:00.0") == near
    assert pinned.cpus_near("ffff:ff:ff.f") == mine

    def watched(array: Any, start: int) -> None:
        seen.append(os.sched_getaffinity(0))
        touch(array, start)

    monkeypatch.setattr(pinned, "_touch_part", watched)
    monkeypatch.setattr(pinned, "cpus_near", lambda bus: {one})
    pinned_tensor(driver, (MIB,))
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == mine


def flags_of(address: int) -> list[str]:
    """What the system knows of the mapping that this address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return pytest.skip("this system does not tell how memory is mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no huge pages")
def test_huge_pages_are_asked_for_before_memory_is_touched(
    driver: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags: list[list[str]] = []
    monkeypatch.setattr(pinned, "_touch_part", lambda array, start: flags.append(flags_of(array.ctypes.data)))
    pinned_tensor(driver, (8 * MIB,))
    assert ["hg" in found for found in flags] == [True]


def test_nothing_is_no_memory(driver: SimulatedCuda) -> None:
    assert pinned_tensor(driver, (0, 4096)).numel() == 0
    assert driver.pinned == {}


def big(device: int, host: int) -> PoolSpec:
    return pool(size=MIB, device_pages=device, host_pages=host)


def test_each_tier_has_a_memory_of_its_own(simulated_device: Make) -> None:
    device = simulated_device(free=100 * MIB)
    device.check_room({"a": 90 * MIB}, {"b": 90 * MIB})
    with pytest.raises(ConfigError, match="'full' on the device"):
        Mover(device, [big(101, 1)])
    with pytest.raises(ConfigError, match="'full' on the host"):
        Mover(device, [big(1, 1 << 30)])
    assert driver_of(device).pinned == {}


# Bytes on every path, merged runs, and the choice between paths.


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


# merging


def rows(dst: np.ndarray, src: np.ndarray, *, layers: int = 1, dst_pitch: int = 64, src_pitch: int = 64) -> RowCopies:
    to, of = (np.array([side << 30 | i << 16 for i in range(layers)], np.uint64) for side in (1, 2))
    return RowCopies(OUT, RowSide(to, dst, dst_pitch), RowSide(of, src, src_pitch), 64)


class Written(SimulatedCuda):
    """Writes down where each byte of 64 would come from, and copies nothing."""

    moved: dict[int, int]

    def _copy(self, stream: int, towards: CopyDirection | None, found: list[Piece], entries: int) -> None:
        for dst, src, size in found:
            for i in range(0, size, 64):
                assert dst + i not in self.moved, "twice"
                self.moved[dst + i] = src + i


def test_neighbours_on_both_sides_are_one_piece() -> None:
    found = RowPaths(rows(ids(0, 1, 2, 7, 8, 5), ids(3, 4, 5, 6, 7, 9)), DMA, 1)
    assert found.spans.size.tolist() == [192, 128, 64]
    assert found.spans.src.tolist() == [3 * 64, 6 * 64, 9 * 64]
    assert found.scattered.tolist() == []


def test_merging_moves_what_was_asked_for(drivers: list[SimulatedCuda]) -> None:
    rng = np.random.default_rng(5)
    for layers, distance, settings in product((1, 3), (64, 192), (DMA, SOME, KERNEL)):
        for _ in range(20):
            count = int(rng.integers(8, 40))
            dst, src = (np.sort(rng.permutation(64)[:count]).astype(np.intp) for _ in range(2))
            r = rows(dst, src, layers=layers, dst_pitch=distance)
            driver = Written()
            driver.moved = {}
            drivers.append(driver)
            for call in RowPaths(r, settings, layers).calls(driver, 7):
                call()
            assert driver.moved == {
                int(b) + int(i) * distance: int(c) + int(j) * 64
                for b, c in zip(r.dst.bases, r.src.bases, strict=True) for i, j in zip(dst, src, strict=True)
            }  # fmt: skip
            assert driver.calls["launch"] <= (settings is not DMA)


# registrations


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("settings", [DMA, KERNEL], ids=["copy engines", "kernel"])
async def test_no_piece_lies_in_two_registrations(
    simulated_device: Make, monkeypatch: pytest.MonkeyPatch, settings: CudaSettings, layers: int
) -> None:
    """Pages of 3 KiB, pinned 8 at a time, in runs that go across several edges. The driver would tell of one that does,
    as the real one does."""
    monkeypatch.setattr(pinned, "CHUNK", 30 << 10)
    device = simulated_device(settings=settings)
    mover = Mover(device, [pool(size=3 << 10, layers=layers)])
    assert sorted(driver_of(device).pinned.values()) == [24 << 10] * 6
    fill_device(mover)
    pages = list(range(29))
    await mover.backup([move(pages, [p + 3 for p in pages])]).wait()
    assert all(host_page(mover, "full", p + 3) == device_page(mover, "full", p) for p in pages)
    await mover.load([move([p + 3 for p in pages], [p + 1 for p in pages])]).done.wait()
    assert all(host_page(mover, "full", p + 3) == device_page(mover, "full", p + 1) for p in pages)


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


async def test_the_kernel_takes_as_many_blocks_as_it_may(simulated_device: Make) -> None:
    device = simulated_device(settings=CudaSettings(blocks=13))
    mover, taken = Mover(device, [pool(device_pages=128, host_pages=128)]), driver_of(device).blocks
    await mover.load([move(list(range(0, 80, 2)), list(range(40)))]).done.wait()
    assert taken == [13] * mover.layers
    taken.clear()
    await mover.clone([move(list(range(0, 80, 2)), list(range(1, 81, 2)))]).wait()
    assert set(taken) == {choosing_paths.BLOCKS_WITHIN}, "within the device memory is much faster"
