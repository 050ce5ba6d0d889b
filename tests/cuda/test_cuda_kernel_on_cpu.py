"""The copy kernel's own C, compiled for the CPU and run thread by thread: which bytes it moves, whatever the shape.

Nothing of it is written again here: only the two functions in assembler are replaced, by a copy of 16 bytes each.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from asynccache.memory.cuda import kernels
from tests.stores.server import NowhereRequired, path_of

BEFORE = """
#include <cstddef>
#include <cstring>
struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };
static dim threadIdx, blockIdx, gridDim, blockDim;
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
static uint4 load(const void* from) { uint4 v; memcpy(&v, from, 16); return v; }
static void store(void* to, uint4 v) { memcpy(to, &v, 16); }
"""

AFTER = """
extern "C" void run(unsigned blocks, unsigned threads, const Table* table) {
    gridDim.x = blocks; blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            asynccache_copy_rows(*table);
}
#define AT(field) offsetof(Table, field)
static const size_t places[] = {
    AT(dst_bases), AT(src_bases), AT(width), AT(dst_pitch), AT(src_pitch), AT(layers), AT(pages), AT(dst_ids),
    AT(src_ids), sizeof(Table),
};
extern "C" size_t place(unsigned i) { return places[i]; }
"""

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel, as ``run`` of the geometry and of its parameter, and where the parameter's fields are."""
    compiler = path_of("g++", "c++", install="apt-get install g++", missing=NowhereRequired)
    folder: FilePath = tmp_path_factory.mktemp("kernel")
    body, replaced = re.subn(r"__device__ __forceinline__ .*?\n}\n", "", kernels.SOURCE, flags=re.DOTALL)
    assert replaced == 2
    (folder / "k.cpp").write_text(BEFORE + body + AFTER)
    command = [compiler, "-O1", "-fPIC", "-shared", "-w", "k.cpp", "-o", "k.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "k.so"))
    library.run.argtypes, library.run.restype = (ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p), None
    library.place.restype = ctypes.c_size_t
    return library


def test_numpy_lays_the_table_out_as_the_kernel_reads_it(compiled: ctypes.CDLL) -> None:
    names = kernels.TABLE.names
    assert names is not None
    places = [kernels.TABLE.fields[name][1] for name in names]  # type: ignore[index]
    assert [compiled.place(i) for i in range(len(names) + 1)] == [*places, kernels.TABLE.itemsize]


class Shape:
    """A random launch: pages in any order, gaps between rows, and widths around whole tiles."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.layers, self.pages = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        self.width = 16 * int(rng.choice([1, 2, 31, 32, 33, 127, 128, 129, 257, 513]))
        if seed % 40 == 39:  # as many rows as there is room for in a launch, short ones
            self.layers, self.pages, self.width = kernels.LAYERS, kernels.PAGES, 16 * int(rng.integers(1, 4))
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

    def table(self) -> npt.NDArray[Any]:
        dst, src = (np.array(bases, np.uint64) for bases in (
            [self.dst.ctypes.data + i * self.width for i in range(self.layers)],
            [self.src[i].ctypes.data for i in range(self.layers)],
        ))  # fmt: skip
        return kernels.table(dst, src, self.dst_ids, self.src_ids, width=self.width, dst_pitch=self.dst_pitch,
                             src_pitch=self.src_pitch)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_it_moves_the_bytes_that_it_was_asked_to_and_no_others(compiled: ctypes.CDLL, seed: int) -> None:
    """Eight shapes a seed."""
    for number in range(8):
        shape = Shape(8 * seed + number)
        wanted = shape.wanted()
        table = shape.table()
        compiled.run(shape.blocks, shape.threads, table.ctypes.data)
        assert np.array_equal(shape.dst, wanted), vars(shape).keys()


def test_the_shapes_have_tails_and_more_work_than_warps_and_less() -> None:
    shapes = [Shape(seed) for seed in range(320)]
    warps = [s.blocks * s.threads // 32 for s in shapes]
    tiles = [s.layers * s.pages * -(-s.width // 2048) for s in shapes]
    assert {s.width % 2048 for s in shapes} == {0, 16, 32, 48, 496, 512, 528, 2032}
    assert sum(t > w for t, w in zip(tiles, warps, strict=True)) > 30
    assert sum(t < w for t, w in zip(tiles, warps, strict=True)) > 30
