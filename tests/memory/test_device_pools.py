"""Pools: layout, views without copies, laziness, and refusals before anything is allocated."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from asynccache.errors import ConfigError
from asynccache.memory import pools
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import DevicePool, HostPool, check_room
from tests.memory.small_pools import pool

SPEC = pool(size=96, layers=3, device_pages=8, host_pages=5)


def test_device_layers_are_zeroed_bytes_of_a_page() -> None:
    p = DevicePool.allocate(SPEC, CpuDevice())
    assert [tuple(p.layer(i).shape) for i in range(3)] == [(8, 32)] * 3
    assert all(p.layer(i).dtype == torch.uint8 and p.layer(i).is_contiguous() for i in range(3))
    assert not any(p.layer(i).any() for i in range(3))


def test_stacked_view_and_layers_are_the_same_memory() -> None:
    p = DevicePool.allocate(SPEC, CpuDevice())
    p.layer(2)[5, 7] = 9
    assert p.stacked is not None
    assert p.stacked[5, 2, 7] == 9
    assert p.arrays[2][5, 7] == 9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.uint8])
def test_engine_tensors_are_viewed_not_copied(dtype: torch.dtype) -> None:
    mine = [torch.zeros((8, 2, 32 // 2 // dtype.itemsize), dtype=dtype) for _ in range(3)]
    p = DevicePool(SPEC, mine)
    assert [p.layer(i).data_ptr() for i in range(3)] == [t.data_ptr() for t in mine]
    assert tuple(p.layer(1).shape) == (8, 32)
    p.layer(1)[4] = 0x3C
    assert mine[1].view(torch.uint8)[4].eq(0x3C).all()
    assert p.stacked is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.zeros(8, 32, dtype=torch.uint8)] * 2, "2 tensors given, 3 layers expected"),
        ([torch.zeros(7, 32, dtype=torch.uint8)] * 3, "does not begin with 8 pages"),
        ([torch.zeros(8, 32, dtype=torch.float16)] * 3, "512 bytes given, 256 expected"),
        ([torch.zeros(32, 8, dtype=torch.uint8).T] * 3, "not contiguous"),
        ([torch.zeros((), dtype=torch.uint8)] * 3, "does not begin with 8 pages"),
    ],
)
def test_engine_tensors_that_do_not_fit_are_refused(tensors: list[torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        DevicePool(SPEC, tensors)
    assert "'full'" in str(e.value)


@pytest.mark.parametrize(("align", "stride"), [(1, 96), (512, 512), (4096, 4096)])
def test_host_pages_are_writable_runs(align: int, stride: int) -> None:
    p = HostPool.allocate(SPEC, CpuDevice(), align=align)
    assert p.stride == stride
    assert len(p.memory) == 5 * stride
    p.page(3)[:] = bytes(range(96))
    assert p.memory[3 * stride : 3 * stride + 96] == bytes(range(96))
    assert p.array.shape == (5, 3, 32)
    assert p.array[3].tobytes() == bytes(range(96))
    assert bytes(p.page(4)) == bytes(96)


def test_aligned_host_pages_start_at_block_addresses() -> None:
    p = HostPool.allocate(SPEC, CpuDevice(), align=pools.BLOCK)
    assert np.frombuffer(p.page(1), np.uint8).ctypes.data % pools.BLOCK == 0


def test_a_logical_pool_has_no_buffer() -> None:
    logical = replace(SPEC, bytes_per_page=0)
    assert len(HostPool.allocate(logical, CpuDevice()).memory) == 0
    with pytest.raises(IndexError):
        DevicePool.allocate(logical, CpuDevice()).layer(0)
    with pytest.raises(ConfigError, match="logical"):
        _ = HostPool.allocate(logical, CpuDevice()).array


def test_allocation_costs_nothing_until_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    p = HostPool.allocate(pool(size=1 << 20, layers=1, host_pages=2048), CpuDevice())
    assert time.process_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # kilobytes, of 2 GiB
    assert len(p.memory) == 2 << 30


def test_check_room_names_the_pool_and_the_sizes() -> None:
    check_room([("a", 3 << 30), ("b", 1 << 30)], 4 << 30)
    with pytest.raises(ConfigError, match=r"b: 2\.00 GiB do not fit .* 4\.00 GiB .*, 3\.00 GiB"):
        check_room([("a", 3 << 30), ("b", 2 << 30)], 4 << 30)


def test_available_memory_is_that_of_this_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < pools.available_memory() <= total
