"""The copy kernel, and how it is compiled: by NVRTC, which needs no GPU.

Law: one kernel, which moves rows of any number of layers between any two places that the device can address. A warp
takes a tile of 2 KiB at a time: each lane has four loads of 16 bytes in flight before its first store, past L1, where
nobody would look for them again. A few blocks fill the bus; more would only take multiprocessors from whoever computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

THREADS = 1024
NAME = "asynccache_copy_rows"

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;

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
extern "C" __global__ void __launch_bounds__(1024) asynccache_copy_rows(
        const u64* __restrict__ dst_bases, const u64* __restrict__ src_bases,
        const int* __restrict__ dst_ids, const int* __restrict__ src_ids,
        u32 layers, u32 pages, u64 width, u64 dst_pitch, u64 src_pitch) {
    const u32 TILE = 2048, lane = threadIdx.x & 31;
    const u64 tiles = (width + TILE - 1) / TILE;
    const u64 total = tiles * pages * layers;
    const u64 warps = (u64)gridDim.x * (blockDim.x >> 5);
    for (u64 t = (u64)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); t < total; t += warps) {
        const u64 row = t / tiles;
        const u32 layer = row / pages, page = row % pages;
        const u64 begin = (t % tiles) * TILE + lane * 16;
        const char* src = (const char*)src_bases[layer] + (u64)src_ids[page] * src_pitch;
        char* dst = (char*)dst_bases[layer] + (u64)dst_ids[page] * dst_pitch;
        uint4 v[4];
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (begin + k * 512 < width) v[k] = load(src + begin + k * 512);
        #pragma unroll
        for (int k = 0; k < 4; ++k)
            if (begin + k * 512 < width) store(dst + begin + k * 512, v[k]);
    }
}
"""


class NoCompiler(RuntimeError):
    """NVRTC is not installed, or its library cannot be loaded."""


def image_for(capability: tuple[int, int]) -> bytes:
    """What a device of this capability loads: machine code; for one that is newer than NVRTC, PTX of the newest
    architecture below it, which the driver translates.

    Raises:
        RuntimeError: as ``compile_for``.
    """
    known = architectures()
    if not known or capability in known:
        return compile_for(capability)
    older = [one for one in known if one < capability]
    return compile_for(max(older), machine_code=False) if older else compile_for(capability)


def architectures() -> list[tuple[int, int]]:
    """The capabilities that NVRTC compiles for."""
    with _found() as nvrtc:
        return [divmod(number, 10) for number in nvrtc.getSupportedArchs()]


def compile_for(capability: tuple[int, int], *, machine_code: bool = True) -> bytes:
    """The kernel for a device of this capability: a cubin, or PTX. Needs cupy and NVRTC, and no GPU.

    Raises:
        NoCompiler: there is no NVRTC.
        RuntimeError: NVRTC refused it; the message is its log.
    """
    with _found() as nvrtc:
        return _compiled(nvrtc, capability, machine_code)


@contextmanager
def _found() -> Iterator[Any]:
    """cupy tells only at the first call that NVRTC's library is missing."""
    try:
        yield import_module("cupy").cuda.nvrtc
    except ImportError as error:
        raise NoCompiler(f"NVRTC is not installed: {str(error).strip().splitlines()[0]}") from error


def _compiled(nvrtc: Any, capability: tuple[int, int], machine_code: bool) -> bytes:
    target = f"{'sm' if machine_code else 'compute'}_{capability[0]}{capability[1]}"
    program = nvrtc.createProgram(SOURCE, f"{NAME}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={target}", "--std=c++17"))
        found: bytes = nvrtc.getCUBIN(program) if machine_code else _as_bytes(nvrtc.getPTX(program))
        return found
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"NVRTC: {error}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def _as_bytes(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()
