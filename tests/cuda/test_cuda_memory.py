"""Pinned host memory: exact, in chunks, unpinned before it is unmapped; and room that is checked first."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from asynccache.config import PoolSpec
from asynccache.errors import ConfigError
from asynccache.memory.cuda import pinned
from asynccache.memory.cuda.pinned import pinned_tensor
from asynccache.memory.pools import BLOCK, Mover
from tests.cuda.conftest import Make
from tests.cuda.cuda_kit import driver_of
from tests.cuda.simulated_cuda import SimulatedCuda
from tests.memory.small_pools import pool

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


class Looking(SimulatedCuda):
    """``resident``: for each registration, whether all of its memory was there already."""

    def __init__(self) -> None:
        super().__init__()
        self.resident: list[bool] = []

    def host_register(self, address: int, size: int) -> None:
        pages = ctypes.create_string_buffer(-(-size // BLOCK))
        if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages):
            pytest.skip(f"this system does not tell what is in memory: {os.strerror(ctypes.get_errno())}")
        self.resident.append(all(page[0] & 1 for page in zip(pages.raw, strict=True)))
        super().host_register(address, size)


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
from tests.cuda.simulated_cuda import SimulatedCuda
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


def test_memory_is_touched_by_several_threads_at_once_and_pinned_then(
    drivers: list[SimulatedCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, together, touch = Looking(), threading.Barrier(2), pinned._touch_part
    drivers.append(driver)

    def meet(array: Any, start: int) -> None:
        together.wait(30)
        touch(array, start)

    monkeypatch.setattr(pinned, "_touch_part", meet)
    monkeypatch.setattr(pinned, "TOUCH", MIB)
    monkeypatch.setattr(pinned, "CHUNK", 3 * MIB)
    tensor = pinned_tensor(driver, (4 * MIB,))
    assert driver.resident == [True, True]
    del tensor


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


def test_a_pool_that_cannot_be_pinned_says_so_by_name(simulated_device: Make) -> None:
    device = simulated_device(pinnable=MIB)
    with pytest.raises(ConfigError, match="pinned"):
        Mover(device, [big(1, 2)])
    gc.collect()
    assert driver_of(device).pinned == {}


def test_a_chunk_is_so_small_that_a_rank_which_pins_is_heard_within_the_time_out() -> None:
    assert pinned.CHUNK <= 4 << 30
    assert pinned.chunk_of(3 * MIB) <= pinned.CHUNK
