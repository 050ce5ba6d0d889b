"""How a batch is cut into calls, and that every cut copies every page exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynccache.errors import InvariantViolation
from asynccache.memory import host_copies
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.device import CopyDirection, PageCopy
from asynccache.memory.pools import DevicePool, HostPool
from tests.memory.small_pools import pool


def ids(values: list[int]) -> host_copies.Ids:
    return np.array(values, np.intp)


def test_neighbours_become_runs_and_the_rest_index_lists() -> None:
    row = host_copies.DIRECT_BYTES // 2
    pieces = host_copies.cut(ids([3, 4, 9, 20, 21, 22]), ids([7, 8, 1, 30, 31, 40]), row)
    assert pieces[:2] == [(slice(7, 9), slice(3, 5)), (slice(30, 32), slice(20, 22))]
    [(dst, src)] = pieces[2:]
    assert isinstance(dst, np.ndarray)
    assert isinstance(src, np.ndarray)
    assert (dst.tolist(), src.tolist()) == ([1, 40], [9, 22])


def test_small_rows_are_gathered_in_calls_of_bounded_size() -> None:
    row = 1024
    pieces = host_copies.cut(ids(list(range(0, 4000, 2))), ids(list(range(2000))), row)
    sizes = [len(src) for _, src in pieces if isinstance(src, np.ndarray)]
    assert sum(sizes) == 2000
    assert max(sizes) * row == host_copies.GATHER_BYTES


def test_long_runs_are_cut_too() -> None:
    row = host_copies.DIRECT_BYTES
    pieces = host_copies.cut(ids(list(range(10))), ids(list(range(5, 15))), row)
    assert pieces[0] == (slice(5, 9), slice(0, 4))
    assert pieces[-1] == (slice(13, 15), slice(8, 10))
    assert len(pieces) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(range(12)),
    st.permutations(range(12)),
    st.integers(0, 12),
    st.sampled_from([1, 1 << 10, host_copies.DIRECT_BYTES // 3, host_copies.DIRECT_BYTES, host_copies.RUN_BYTES + 1]),
)
def test_every_cut_copies_every_row_once(src: list[int], dst: list[int], n: int, row: int) -> None:
    of, to, written = np.arange(100, 112), np.zeros(12, int), np.zeros(12, int)
    for d, s in host_copies.cut(ids(src[:n]), ids(dst[:n]), row):
        to[d] = of[s]
        written[d] += 1
    expected = {d: 100 + s for s, d in zip(src[:n], dst[:n], strict=True)}
    assert {i: int(to[i]) for i in range(12) if written[i]} == expected
    assert written.max(initial=0) <= 1


@pytest.mark.parametrize(("src", "dst"), [([0, 8], [0, 1]), ([-1], [0]), ([0], [5]), ([0], [-1]), ([0, 1], [2])])
def test_ids_outside_a_pool_are_a_bug_of_the_caller(src: list[int], dst: list[int]) -> None:
    spec, device = pool(device_pages=8, host_pages=5), CpuDevice()
    pair = DevicePool.allocate(spec, device), HostPool.allocate(spec, device)
    with pytest.raises(InvariantViolation):
        host_copies.checked([PageCopy(*pair, np.array(src, np.int32), np.array(dst, np.int32))], CopyDirection.OUT)


def test_the_halves_of_a_torn_step_are_the_whole() -> None:
    spec, device = pool(size=3, layers=1), CpuDevice()  # an odd size: the halves differ
    p = DevicePool.allocate(spec, device)
    host = HostPool.allocate(spec, device)
    p.arrays[0][:] = 5
    ids = (np.array([1], np.int32), np.array([2], np.int32))
    part = host_copies.checked([PageCopy(p, host, *ids)], CopyDirection.OUT)
    step = host_copies.whole_step(part, CopyDirection.OUT)
    running = host_copies.perform(step, {0: host_copies.Hitch(1.0, 2.0, False)}, ())
    assert next(running) == 1.0
    assert bytes(host.page(2)) == bytes([0, 0, 0])
    assert next(running) == 2.0
    assert bytes(host.page(2)) == bytes([5, 0, 0])
    with pytest.raises(StopIteration):
        next(running)
    assert bytes(host.page(2)) == bytes([5, 5, 5])
