"""Pools as tensors with a shape, and the page tables of a step, as kernels of paged attention take them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from asynccache import CacheConfig, ConfigError, Full, Mamba, SlidingWindow
from asynccache.memory.cpu import CpuDevice
from asynccache.memory.pools import DevicePool

PAGE, PAGES, LAYERS, HEADS, DIM, QUERY_HEADS = 16, 24, 2, 2, 8, 4
FULL = Full.attention(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, device=PAGES * PAGE)


def pools(*components: Full | SlidingWindow | Mamba) -> list[DevicePool]:
    specs = CacheConfig(model="m", components=components, page_size=PAGE).pools()
    return [DevicePool.allocate(spec, CpuDevice()) for spec in specs]


def test_keys_and_values_are_the_bytes_of_a_layer() -> None:
    (pool,) = pools(FULL)
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
    _, pool = pools(FULL, mamba)
    conv, scan = pool.states(2)
    assert (conv.shape, scan.shape) == ((5, 6, 4), (5, 2, 3, 5))
    conv[1], scan[1] = 1.5, -2.0
    assert pool.layer(2)[1].view(torch.bfloat16).tolist() == [1.5] * 24 + [-2.0] * 30
    assert not pool.layer(2)[0].any()


def test_pages_that_are_bytes_have_no_shape() -> None:
    full, mamba = pools(Full(bytes_per_token=64, device_tokens=64), Mamba(state_bytes=8, device_states=2))
    for call in (lambda: full.kv(0), lambda: mamba.states(0), lambda: full.block_table([], [])):
        with pytest.raises(ConfigError, match="its pages are bytes"):
            call()


def test_states_have_no_keys_and_no_page_table_and_keys_are_no_states() -> None:
    full, mamba = pools(FULL, Mamba.recurrent(layers=1, parts=((6,),), device=4))
    for call in (lambda: mamba.kv(0), lambda: mamba.block_table([np.array([1], np.int32)], [1])):
        with pytest.raises(ConfigError, match="'mamba': it has states"):
            call()
    with pytest.raises(ConfigError, match="'full': it has keys and values"):
        full.states(0)


def test_a_block_table_is_what_kernels_take() -> None:
    (pool,) = pools(FULL)
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
    _, pool = pools(FULL, window)
    assert pool.block_table([np.array([-1, 3], np.int32)], [20]).pages.tolist() == [[PAGES, 3]]


@pytest.mark.parametrize(("tables", "lengths", "match"), [
    ([[1]], [17], "need 2 pages, the page table has 1"), ([[1]], [1, 1], "2 for 1 page tables"),
    ([[1]], [0], "must be at least 1"), ([[1]], [1.5], "must be an integer"),
])  # fmt: skip
def test_a_table_that_is_too_short_is_refused(tables: list[list[int]], lengths: list[int], match: str) -> None:
    (pool,) = pools(FULL)
    with pytest.raises(ConfigError, match=match):
        pool.block_table([np.array(table, np.int32) for table in tables], lengths)


def test_an_engines_own_tensors_may_have_a_page_for_padding() -> None:
    (spec,) = CacheConfig(model="m", components=(FULL,), page_size=PAGE).pools()
    shape = (2, PAGE, HEADS, DIM)
    padded = DevicePool(spec, [torch.zeros(PAGES + 1, *shape) for _ in range(LAYERS)])
    exact = DevicePool(spec, [torch.zeros(PAGES, *shape) for _ in range(LAYERS)])
    assert (padded.padding, exact.padding) == (PAGES, None)
    assert padded.kv(0).shape[0] == PAGES + 1
    tables = [np.array([5, 2], np.int32), np.array([1], np.int32)]
    assert exact.block_table(tables, [16, 16]).pages.tolist() == [[5], [1]]
    with pytest.raises(ConfigError, match=f"give it {PAGES + 1} pages"):
        exact.block_table(tables, [17, 16])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_pytorchs_paged_flex_attention_reads_the_pages_in_place() -> None:
    """As in docs/embedding.md: the pages of a layer are one row of blocks, of which keys are the even ones."""
    rng = torch.Generator().manual_seed(1)
    (pool,) = pools(FULL)
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
