"""Pools: layout, shapes, refusals before anything is allocated; the names of devices, and the simulated one."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from asynccache import CacheConfig, Full, Mamba, Sidecar, SlidingWindow
from asynccache.cli.options import parsed_device
from asynccache.core.plan import Move
from asynccache.errors import ConfigError
from asynccache.memory import pools
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.cuda.settings import CudaSettings, settings_from
from asynccache.memory.device import OPTIONS, DeviceName, parse_device
from asynccache.memory.host_copies import Faults
from asynccache.memory.mover import Mover
from asynccache.memory.pools import DevicePool, HostPool, check_room
from tests.memory.small_pools import device_page, filled, host_page, move
from tests.memory.small_pools import pool as spec_of
from tests.simulated.device import SimulatedDevice
from tests.simulated.loop import simulate

# Pools: layout, views without copies, laziness, and refusals before anything is allocated.


SPEC = spec_of(size=96, layers=3, device_pages=8, host_pages=5)


def test_device_layers_are_zeroed_bytes_of_a_page_in_one_stack() -> None:
    p = DevicePool.allocate(SPEC, CpuDevice().device_tensor)
    assert [tuple(p.layer(i).shape) for i in range(3)] == [(8, 32)] * 3
    assert all(p.layer(i).dtype == torch.uint8 and p.layer(i).is_contiguous() for i in range(3))
    assert not any(p.layer(i).any() for i in range(3))
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


@pytest.mark.parametrize(("align", "stride"), [(1, 96), (512, 512), (pools.BLOCK, pools.BLOCK)])
def test_host_pages_are_writable_runs(align: int, stride: int) -> None:
    p = HostPool.allocate(SPEC, CpuDevice().host_tensor, align=align)
    assert p.stride == stride
    assert len(p.memory) == 5 * stride
    p.page(3)[:] = bytes(range(96))
    assert p.memory[3 * stride : 3 * stride + 96] == bytes(range(96))
    assert p.array.shape == (5, 3, 32)
    assert p.array[3].tobytes() == bytes(range(96))
    assert bytes(p.page(4)) == bytes(96)
    assert np.frombuffer(p.page(1), np.uint8).ctypes.data % align == 0


def test_a_logical_pool_has_no_buffer() -> None:
    logical = replace(SPEC, bytes_per_page=0)
    assert len(HostPool.allocate(logical, CpuDevice().host_tensor).memory) == 0
    with pytest.raises(IndexError):
        DevicePool.allocate(logical, CpuDevice().device_tensor).layer(0)
    with pytest.raises(ConfigError, match="logical"):
        _ = HostPool.allocate(logical, CpuDevice().host_tensor).array


def test_allocation_costs_nothing_until_touched() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    p = HostPool.allocate(spec_of(size=1 << 20, layers=1, host_pages=2048), CpuDevice().host_tensor)
    assert time.process_time() - started < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # kilobytes, of 2 GiB
    assert len(p.memory) == 2 << 30


def test_check_room_names_the_pool_and_the_sizes() -> None:
    check_room([("a", 3 << 30), ("b", 1 << 30)], 4 << 30)
    with pytest.raises(ConfigError, match=r"b: 2\.00 GiB do not fit .* 4\.00 GiB .*, 3\.00 GiB"):
        check_room([("a", 3 << 30), ("b", 2 << 30)], 4 << 30)


# Pools as tensors with a shape, and the page tables of a step, as kernels of paged attention take them.


PAGE, PAGES, LAYERS, HEADS, DIM, QUERY_HEADS = 16, 24, 2, 2, 8, 4
FULL = Full.attention(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, device=PAGES * PAGE)


def pools_of(*components: Full | SlidingWindow | Mamba) -> list[DevicePool]:
    specs = CacheConfig(model="m", components=components, page_size=PAGE).pools()
    return [DevicePool.allocate(spec, CpuDevice().device_tensor) for spec in specs]


def test_keys_and_values_are_the_bytes_of_a_layer() -> None:
    (pool,) = pools_of(FULL)
    kv = pool.kv(1)
    assert kv.shape == (PAGES + 1, 2, PAGE, HEADS, DIM)
    assert kv.dtype == torch.float32
    kv[3] = torch.arange(kv[3].numel(), dtype=torch.float32).view_as(kv[3])
    assert torch.equal(pool.layer(1)[3], kv[3].reshape(-1).view(torch.uint8))
    assert not pool.layer(0).any()
    assert pool.layer(1).shape[0] == PAGES  # the padding is no page of the cache


def test_states_are_tensors_of_their_shapes() -> None:
    parts = ((6, 4), (2, 3, 5))
    mamba = Mamba.recurrent(layers=3, parts=parts, dtype="bfloat16", device=4)
    _, pool = pools_of(FULL, mamba)
    conv, scan = pool.states(2)
    assert (conv.shape, scan.shape) == ((5, 6, 4), (5, 2, 3, 5))
    conv[1], scan[1] = 1.5, -2.0
    assert pool.layer(2)[1].view(torch.bfloat16).tolist() == [1.5] * 24 + [-2.0] * 30
    assert not pool.layer(2)[0].any()


def test_pages_that_are_bytes_have_no_shape() -> None:
    full, mamba = pools_of(Full(bytes_per_token=64, device_tokens=64), Mamba(state_bytes=8, device_states=2))
    for call in (lambda: full.kv(0), lambda: mamba.states(0), lambda: full.block_table([], [])):
        with pytest.raises(ConfigError, match="its pages are bytes"):
            call()


def test_states_have_no_keys_and_no_page_table_and_keys_are_no_states() -> None:
    full, mamba = pools_of(FULL, Mamba.recurrent(layers=1, parts=((6,),), device=4))
    for call in (lambda: mamba.kv(0), lambda: mamba.block_table([np.array([1], np.int32)], [1])):
        with pytest.raises(ConfigError, match="'mamba': it has states"):
            call()
    with pytest.raises(ConfigError, match="'full': it has keys and values"):
        full.states(0)


def test_a_block_table_is_what_kernels_take() -> None:
    (pool,) = pools_of(FULL)
    table = pool.block_table([np.array([5, 2, 9, 7], np.int32), np.array([1], np.int32)], [33, 16])
    assert table.pages.tolist() == [[5, 2, 9], [1, PAGES, PAGES]]  # pages that the step does not need are left out
    assert table.lengths.tolist() == [33, 16]
    assert table.indptr.tolist() == [0, 3, 4]
    assert table.indices.tolist() == [5, 2, 9, 1]
    assert table.last_page_len.tolist() == [1, 16]
    assert {part.dtype for part in table} == {torch.int32}
    assert [part.shape[0] for part in pool.block_table([], [])] == [0, 0, 1, 0, 0]


def test_what_left_the_window_is_padding() -> None:
    window = SlidingWindow.attention(window=16, layers=1, kv_heads=1, head_dim=4, dtype="float32", device=PAGES * PAGE)
    _, pool = pools_of(FULL, window)
    assert pool.block_table([np.array([-1, 3], np.int32)], [20]).pages.tolist() == [[PAGES, 3]]


@pytest.mark.parametrize(("tables", "lengths", "match"), [
    ([[1]], [17], "need 2 pages, the page table has 1"), ([[1]], [1, 1], "2 for 1 page tables"),
    ([[1]], [0], "must be at least 1"), ([[1]], [1.5], "must be an integer"),
])  # fmt: skip
def test_a_table_that_is_too_short_is_refused(tables: list[list[int]], lengths: list[int], match: str) -> None:
    (pool,) = pools_of(FULL)
    with pytest.raises(ConfigError, match=match):
        pool.block_table([np.array(table, np.int32) for table in tables], lengths)


def test_an_engines_own_tensors_may_have_a_page_for_padding() -> None:
    (spec,) = CacheConfig(model="m", components=(FULL,), page_size=PAGE).pools()
    shape = (2, PAGE, HEADS, DIM)
    padded = DevicePool(spec, [torch.zeros(PAGES + 1, *shape) for _ in range(LAYERS)])
    exact = DevicePool(spec, [torch.zeros(PAGES, *shape) for _ in range(LAYERS)])
    uneven = DevicePool(spec, [torch.zeros(PAGES + (i == 0), *shape) for i in range(LAYERS)])
    assert (padded.padding, exact.padding, uneven.padding) == (PAGES, None, None)
    assert padded.kv(0).shape[0] == PAGES + 1
    tables = [np.array([5, 2], np.int32), np.array([1], np.int32)]
    assert exact.block_table(tables, [16, 16]).pages.tolist() == [[5], [1]]
    with pytest.raises(ConfigError, match=f"give it {PAGES + 1} pages"):
        exact.block_table(tables, [17, 16])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pytorchs_paged_flex_attention_reads_the_pages_in_place() -> None:
    """As in docs/embedding.md: the pages of a layer are one row of blocks, of which keys are the even ones."""
    rng = torch.Generator().manual_seed(1)
    (pool,) = pools_of(FULL)
    kv, lengths = pool.kv(1), [37, 16, 70]
    ids = np.random.default_rng(1).permutation(PAGES).astype(np.int32)
    tables = [ids[:3], ids[3:4], ids[4:9]]
    kept = [torch.randn(2, n, HEADS, DIM, generator=rng) for n in lengths]
    kv[:] = torch.nan  # whatever attention reads beside the requests' tokens shows
    for table, both in zip(tables, kept, strict=True):
        for at in range(both.shape[1]):
            kv[table[at // PAGE], :, at % PAGE] = both[:, at]
    kv[torch.isnan(kv)] = 1e4
    step = pool.block_table(tables, lengths)

    rows = kv.flatten(0, 2)  # [pages * 2 * page_size, heads, dim]
    keys, values = rows[:-PAGE].transpose(0, 1)[None], rows[PAGE:].transpose(0, 1)[None]
    blocks = len(keys[0, 0]) // PAGE
    paged = PagedAttention(blocks, PAGE, len(lengths), device="cpu")
    pages = step.pages.long()
    paged.page_table[:, : pages.shape[1]] = 2 * pages
    numbers = torch.arange(pages.shape[1]).expand_as(pages)
    paged.physical_to_logical.scatter_(1, 2 * pages, numbers)
    mask = create_block_mask(lambda b, h, q, k: k <= q, len(lengths), None, 1, pages.shape[1] * PAGE, device="cpu",
                             BLOCK_SIZE=(1, PAGE))  # fmt: skip
    last = step.lengths.long() - 1
    mask.mask_mod = lambda b, h, q, k: k <= last[b]
    mask = paged.convert_logical_block_mask(mask, kv_len=step.lengths)
    query = torch.randn(len(lengths), QUERY_HEADS, 1, DIM, generator=rng)
    keys, values = (one.expand(len(lengths), -1, -1, -1) for one in (keys, values))
    found = flex_attention(query, keys, values, block_mask=mask, enable_gqa=True)

    for i, (both, one) in enumerate(zip(kept, query, strict=True)):
        k, v = (part.transpose(0, 1).repeat_interleave(QUERY_HEADS // HEADS, 0) for part in both)
        expected = (one @ k.transpose(1, 2) / DIM**0.5).softmax(-1) @ v
        torch.testing.assert_close(found[i], expected)


# Pools that hold some of the model's layers: a load brings layer i of the model whole before layer i+1.


# A model of five layers: full attention in 1 and 4, windows in 0, 2 and 3, and two tensors of layer 4 in a sidecar.
CONFIG = CacheConfig(
    model="m", page_size=4,
    components=(
        Full(bytes_per_token=6, device_tokens=16, host_tokens=16, layers=2, covers=(1, 4)),
        SlidingWindow(window=8, bytes_per_token=6, device_tokens=16, host_tokens=16, layers=3, covers=(0, 2, 3)),
    ),
    sidecars=(Sidecar(name="scales", indices_from="full", bytes_per_page=8, layers=2, covers=(4, 4)),),
)  # fmt: skip
ALL = np.arange(4, dtype=np.int32)


async def test_all_of_it_arrives_and_each_layer_with_its_event(cpu: CpuDevice) -> None:
    mover = Mover(cpu, CONFIG.pools())
    for i, pool in enumerate(mover.host_pools.values()):
        pool.array[:] = i + 1
    moves = [Move(0, ALL.tobytes(), ALL.tobytes()), Move(1, ALL.tobytes(), ALL.tobytes())]
    events = mover.load(moves)
    assert len(events.layers) == 5
    await events.layers[1].wait()
    assert (mover.device_pools["swa"].arrays[0] == 2).all()
    assert (mover.device_pools["full"].arrays[0] == 1).all()
    await events.done.wait()
    for i, device in enumerate(mover.device_pools.values()):
        assert all((array == i + 1).all() for array in device.arrays)


@pytest.mark.parametrize("covers", [(0,), (1, 0), (-1, 0), (0, 1, 2)])
def test_covers_that_do_not_fit_are_refused(covers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"full: covers=.* (for each of layers=2|Expected `int` >= 0)"):
        changed(CONFIG.components[0], covers=covers)
    with pytest.raises(ConfigError, match=r"mamba: covers="):
        Mamba(state_bytes=8, device_states=2, host_states=2, layers=2, covers=covers)
    with pytest.raises(ConfigError, match=r"sidecar 'scales': covers="):
        changed(CONFIG.sidecars[0], covers=covers)


# Names of devices: one grammar for configuration, command line and ``open_device``.


@pytest.mark.parametrize(("text", "name", "shown"), [
    ("cpu", DeviceName("cpu"), "cpu"),
    ("cuda", DeviceName("cuda"), "cuda:0"),
    ("cuda:3", DeviceName("cuda", 3), "cuda:3"),
    ("cuda:1?kernel_loads_below=0&blocks=4", DeviceName("cuda", 1, {"kernel_loads_below": "0", "blocks": "4"}),
     "cuda:1"),
])  # fmt: skip
def test_a_name_is_taken_apart(text: str, name: DeviceName, shown: str) -> None:
    assert parse_device(text) == name
    assert str(parse_device(text)) == shown
    assert parsed_device("--device", text) == text


@pytest.mark.parametrize(("text", "said"), [
    ("gpu", "unknown device 'gpu'; one of cpu, cuda, cuda:N"),
    ("cuda:", "unknown device 'cuda:'"),
    ("cuda:-1", "unknown device"),
    ("cuda:x", "unknown device"),
    pytest.param("cuda:" + "9" * 5000, "unknown device", id="huge"),
    ("cpu:0", "unknown device"),
    ("cpu?blocks=4", "device=cpu: unknown option 'blocks'; one of none"),
    ("cuda:0?block=4", "unknown option 'block'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?out=staged&blocks=16", "unknown option 'out'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?numa_node=0", "unknown option 'numa_node'; one of blocks, kernel_backups_below, kernel_loads_below"),
    ("cuda:0?blocks", "options are name=value"),
])  # fmt: skip
def test_what_is_no_name_is_told(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_device(text)


def test_options_are_the_settings() -> None:
    assert set(OPTIONS) == set(CudaSettings.__struct_fields__)
    text = "cuda:0?blocks=16&kernel_loads_below=65536"
    assert settings_from(parse_device(text).options) == CudaSettings(blocks=16, kernel_loads_below=1 << 16)
    assert settings_from({}) == CudaSettings()


@pytest.mark.parametrize(("name", "value", "said"), [
    ("blocks", "many", "device option blocks='many' must be a number"),
    ("kernel_loads_below", "32KiB", "device option kernel_loads_below='32KiB' must be a number"),
    ("blocks", "0", "blocks=0 must lie between 1 and 1024"),
])  # fmt: skip
def test_a_value_that_cannot_be_is_told(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_from({name: value})


# The simulated device: worlds in virtual time that repeat exactly, and in which a missing wait shows.


async def backup_then_load(seed: int, *, waits: bool) -> tuple[float, bool]:
    """When the load was done, and whether it brought the right bytes."""
    mover = filled(SimulatedDevice(seed=seed), spec_of())
    wanted = device_page(mover, "full", 1)
    backup = mover.backup([move([1], [1])])
    await mover.load([move([1], [2])], after=[backup] if waits else []).done.wait()
    result = asyncio.get_running_loop().time(), device_page(mover, "full", 2) == wanted
    await mover.device.aclose()
    return result


def world(seed: int, *, waits: bool) -> tuple[float, bool]:
    return simulate(lambda _: backup_then_load(seed, waits=waits), seed)


def test_a_missing_wait_shows_on_some_seeds_and_a_wait_never_fails() -> None:
    assert all(world(seed, waits=True)[1] for seed in range(60))
    missing = [world(seed, waits=False)[1] for seed in range(60)]
    assert missing.count(False) > 0


def test_bytes_come_in_two_halves_between_start_and_event() -> None:
    async def main() -> set[int]:
        mover = Mover(SimulatedDevice(seed=1, latency=(0.5, 1.0)), [spec_of(size=64, layers=1)])
        mover.device_pools["full"].arrays[0][:] = 1
        event, seen = mover.backup([move([0], [0])]), set()
        while not event.done():
            seen.add(sum(host_page(mover, "full", 0)))
            await asyncio.sleep(0.01)
        assert sum(host_page(mover, "full", 0)) == 64
        await mover.device.aclose()
        return seen

    assert simulate(lambda _: main(), 1) == {0, 32}


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_impossible_faults_are_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="failing="):
        Faults(failing=share)
    with pytest.raises(ConfigError, match="delay="):
        Faults(delay=(0.2, 0.1))
