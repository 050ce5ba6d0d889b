"""The copy kernel's own C, compiled for the CPU and run thread by thread: which bytes it moves, whatever the shape.

Nothing of it is written again here: only the two functions in assembler are replaced, by a copy of 16 bytes each.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import numpy as np
import numpy.typing as npt
import pytest

from asynccache.memory.cuda import kernels

COMPILER = shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")

BEFORE = """
#include <cstring>
struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };
static dim threadIdx, blockIdx, gridDim, blockDim;
#define __global__
#define __restrict__
#define __launch_bounds__(n)
static uint4 load(const void* from) { uint4 v; memcpy(&v, from, 16); return v; }
static void store(void* to, uint4 v) { memcpy(to, &v, 16); }
"""

AFTER = """
extern "C" void run(unsigned blocks, unsigned threads, const u64* dst_bases, const u64* src_bases, const int* dst_ids,
                    const int* src_ids, u32 layers, u32 pages, u64 width, u64 dst_pitch, u64 src_pitch) {
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            asynccache_copy_rows(dst_bases, src_bases, dst_ids, src_ids, layers, pages, width, dst_pitch, src_pitch);
}
"""

Bytes = npt.NDArray[np.uint8]
Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The kernel as a function of the geometry and its nine parameters."""
    folder: FilePath = tmp_path_factory.mktemp("kernel")
    body, replaced = re.subn(r"__device__ __forceinline__ .*?\n}\n", "", kernels.SOURCE, flags=re.DOTALL)
    assert replaced == 2
    (folder / "k.cpp").write_text(BEFORE + body + AFTER)
    command = [str(COMPILER), "-O1", "-fPIC", "-shared", "-w", "k.cpp", "-o", "k.so"]
    subprocess.run(command, cwd=folder, check=True)
    function = ctypes.CDLL(str(folder / "k.so")).run
    function.argtypes = (*(ctypes.c_uint,) * 2, *(ctypes.c_void_p,) * 4, *(ctypes.c_uint,) * 2,
                         *(ctypes.c_ulonglong,) * 3)  # fmt: skip
    function.restype = None
    called: Run = function
    return called


class Shape:
    """A random launch: pages in any order, gaps between rows, and widths around whole tiles."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layers, self.pages = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        self.width = 16 * int(rng.choice([1, 2, 31, 32, 33, 127, 128, 129, 257, 513]))
        self.src_pitch = self.width + 16 * int(rng.integers(0, 3))
        self.dst_pitch = self.layers * self.width + 16 * int(rng.integers(0, 3))
        slots = self.pages + 4
        self.src: Bytes = rng.integers(0, 256, (self.layers, slots * self.src_pitch), np.uint8)
        self.dst: Bytes = rng.integers(0, 256, slots * self.dst_pitch, np.uint8)
        self.src_ids, self.dst_ids = (rng.permutation(slots)[: self.pages].astype(np.int32) for _ in range(2))
        self.blocks, self.threads = int(rng.integers(1, 9)), int(rng.choice([32, 64, 1024]))

    def wanted(self) -> Bytes:
        """What numpy makes of it. What nobody asked for stays as it was."""
        found = self.dst.copy()
        for of, to in self._rows():
            found[to : to + self.width] = of
        return found

    def _rows(self) -> Iterator[tuple[Bytes, int]]:
        for layer in range(self.layers):
            for d, s in zip(self.dst_ids.tolist(), self.src_ids.tolist(), strict=True):
                start = s * self.src_pitch
                yield self.src[layer, start : start + self.width], d * self.dst_pitch + layer * self.width

    def parameters(self) -> tuple[object, ...]:
        self._bases = (
            np.array([self.dst.ctypes.data + i * self.width for i in range(self.layers)], np.uint64),
            np.array([self.src[i].ctypes.data for i in range(self.layers)], np.uint64),
        )
        arrays = (*self._bases, self.dst_ids, self.src_ids)
        return (self.blocks, self.threads, *(array.ctypes.data for array in arrays), self.layers, self.pages,
                self.width, self.dst_pitch, self.src_pitch)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_it_moves_the_bytes_that_it_was_asked_to_and_no_others(run: Run, seed: int) -> None:
    """Eight shapes a seed."""
    for number in range(8):
        shape = Shape(8 * seed + number)
        wanted = shape.wanted()
        run(*shape.parameters())
        assert np.array_equal(shape.dst, wanted), vars(shape).keys()


def test_the_shapes_have_tails_and_more_work_than_warps_and_less() -> None:
    shapes = [Shape(seed) for seed in range(320)]
    warps = [s.blocks * s.threads // 32 for s in shapes]
    tiles = [s.layers * s.pages * -(-s.width // 2048) for s in shapes]
    assert {s.width % 2048 for s in shapes} == {0, 16, 32, 496, 512, 528, 2032}
    assert sum(t > w for t, w in zip(tiles, warps, strict=True)) > 30
    assert sum(t < w for t, w in zip(tiles, warps, strict=True)) > 30
