"""The copy kernel, and how it is compiled: by NVRTC, which needs no GPU.

There is one kernel. It moves rows of some layers between any two places that the device can address, pinned host memory
too. The rows to move stand in the kernel's parameters, which the driver copies at the launch. So no memory for tables
is allocated, uploaded or kept. A warp takes a tile of 2 KiB at a time. Each of its lanes has four loads of 16 bytes in
flight before its first store; they go past L1, where nobody would look for the bytes again. A few blocks fill the bus;
more would only take multiprocessors from the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from asynccache.memory.cuda.libcuda import Addresses

THREADS = 1024
NAME = "asynccache_copy_rows"
LAYERS, PAGES = 32, 440
"""Layers and pages that one launch moves at most: all parameters of a kernel together have at most 4,096 bytes."""

TABLE = np.dtype([
    ("dst_bases", "<u8", LAYERS), ("src_bases", "<u8", LAYERS), ("width", "<u8"), ("dst_pitch", "<u8"),
    ("src_pitch", "<u8"), ("layers", "<u4"), ("pages", "<u4"), ("dst_ids", "<i4", PAGES), ("src_ids", "<i4", PAGES),
])  # fmt: skip
"""``Table`` of the kernel, as numpy lays it out."""
Table = npt.NDArray[Any]
"""One ``TABLE``: the rows that a launch of the kernel moves."""

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

struct Table {
    u64 dst_bases[LAYERS], src_bases[LAYERS], width, dst_pitch, src_pitch;
    u32 layers, pages;
    int dst_ids[PAGES], src_ids[PAGES];
};

__device__ __forceinline__ uint4 load(const void* from) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ void store(void* to, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Row (layer, page) goes from src_bases[layer] + src_ids[page] * src_pitch
//                          to dst_bases[layer] + dst_ids[page] * dst_pitch.
// Addresses, pitches and width are multiples of 16.
extern "C" __global__ void __launch_bounds__(1024) asynccache_copy_rows(const __grid_constant__ Table t) {
    const u32 TILE = 2048, lane = threadIdx.x & 31;
    const u64 tiles = (t.width + TILE - 1) / TILE;
    const u64 total = tiles * t.pages * t.layers;
    const u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    for (u64 n = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); n < total; n += warps) {
        const u64 row = n / tiles;
        const u32 layer = row / t.pages, page = row % t.pages;
        const u64 begin = (n % tiles) * TILE + lane * 16;
        const char* src = (const char*)t.src_bases[layer] + (u64)t.src_ids[page] * t.src_pitch;
        char* dst = (char*)t.dst_bases[layer] + (u64)t.dst_ids[page] * t.dst_pitch;
        uint4 v[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (begin + k * 512 < t.width) v[k] = load(src + begin + k * 512);
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (begin + k * 512 < t.width) store(dst + begin + k * 512, v[k]);
    }
}
""".replace("LAYERS", str(LAYERS)).replace("PAGES", str(PAGES))


def table(dst_bases: Addresses, src_bases: Addresses, dst_ids: Any, src_ids: Any, **numbers: int) -> Table:
    """Return the table of rows that one launch moves. ``numbers``: ``width``, ``dst_pitch`` and ``src_pitch``, in
    bytes."""
    made = np.zeros((), TABLE)
    lists = {"dst_bases": dst_bases, "src_bases": src_bases, "dst_ids": dst_ids, "src_ids": src_ids}
    for name, values in lists.items():
        made[name][: len(values)] = values
    for name, value in {**numbers, "layers": len(src_bases), "pages": len(src_ids)}.items():
        made[name] = value
    return made


class NoCompiler(RuntimeError):
    """NVRTC is not installed, or its library cannot be loaded."""


def image_for(capability: tuple[int, int]) -> bytes:
    """Return the compiled kernel for a device of this capability: machine code, or, for a device that is newer than
    NVRTC, PTX of the newest architecture below it, which the driver translates.

    Raises:
        RuntimeError: as ``compile_for``.
    """
    older = [one for one in architectures() if one <= capability] or [capability]
    return compile_for(max(older), machine_code=max(older) == capability)


def architectures() -> list[tuple[int, int]]:
    """Return the capabilities that NVRTC compiles for."""
    with _found() as nvrtc:
        return [divmod(number, 10) for number in nvrtc.getSupportedArchs()]


def compile_for(capability: tuple[int, int], *, machine_code: bool = True) -> bytes:
    """Return the kernel for a device of this capability: a cubin, or PTX. Needs cupy and NVRTC, and no GPU.

    Raises:
        NoCompiler: there is no NVRTC.
        RuntimeError: NVRTC refused it; the message is its log.
    """
    target = f"{'sm' if machine_code else 'compute'}_{capability[0]}{capability[1]}"
    with _found() as nvrtc:
        program = nvrtc.createProgram(SOURCE, f"{NAME}.cu", (), ())
        try:
            nvrtc.compileProgram(program, (f"--gpu-architecture={target}", "--std=c++17"))
            found: bytes = nvrtc.getCUBIN(program) if machine_code else nvrtc.getPTX(program)
            return found
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"NVRTC: {error}: {nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)


@contextmanager
def _found() -> Iterator[Any]:
    """Give cupy's ``nvrtc``. cupy tells only at the first call that NVRTC's library is missing, by an error that is no
    ImportError from version 14.2 on: ``NoCompiler`` is raised then, too."""
    try:
        yield import_module("cupy").cuda.nvrtc
    except (ImportError, RuntimeError) as error:
        if not isinstance(error, ImportError) and type(error).__name__ != "DynamicLibNotFoundError":
            raise
        raise NoCompiler(f"NVRTC is not installed: {str(error).strip().splitlines()[0]}") from error
