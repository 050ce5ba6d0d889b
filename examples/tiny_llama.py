"""The model of ``fastapi_app.py`` and ``own_engine.py``: a small Llama in plain PyTorch whose keys and values are in
the cache's pages. It has grouped queries, rotary positions and SwiGLU, and random weights in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from asynccache import DevicePool, Full

PAGE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 16, 2, 4, 2, 16, 512
WIDTH = HEADS * HEAD_DIM
FULL = Full.attention(
    layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32, device="8MiB", host="32MiB"
)
SHAPES = {"qkv": (WIDTH, WIDTH + 2 * KV_HEADS * HEAD_DIM), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH),
          "down": (2 * WIDTH, WIDTH)}  # fmt: skip


class Row(NamedTuple):
    """One request's part of a step: compute the positions ``start`` to ``stop`` of ``tokens``. The KV before ``start``
    is in the pages already. ``pages``: the page table, int32."""

    tokens: Sequence[int] | np.ndarray
    start: int
    stop: int
    pages: np.ndarray


def make_weights(folder: Path, seed: int = 0) -> Path:
    """Write random weights into ``folder``, unless it has some. Returns the folder."""
    file = folder / "tiny_llama.pt"
    if not file.exists():
        rng = torch.Generator().manual_seed(seed)
        layers = {f"{name}{i}": torch.randn(*shape, generator=rng) / shape[0] ** 0.5
                  for i in range(LAYERS) for name, shape in SHAPES.items()}  # fmt: skip
        words = {name: torch.randn(VOCABULARY, WIDTH, generator=rng) for name in ("embedding", "head")}
        torch.save(layers | words, file)
    return folder


class TinyLlama:
    """The model on the pages of one pool. To be called by one thread at a time."""

    def __init__(self, folder: Path, pool: DevicePool) -> None:
        self._weights = torch.load(folder / "tiny_llama.pt", weights_only=True)
        self._kv = [pool.kv(i) for i in range(LAYERS)]  # [pages, keys and values, PAGE, KV_HEADS, HEAD_DIM]

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> list[int]:
        """Compute all ``rows`` in one call, and write their KV to the pages. Returns for each row the likeliest token
        after its ``stop``."""
        weights = self._weights
        at = torch.cat([torch.arange(row.start, row.stop) for row in rows])
        ids = torch.cat([torch.tensor(np.asarray(row.tokens[row.start : row.stop])).long() for row in rows])
        x = weights["embedding"][ids]
        for i, kv in enumerate(self._kv):
            made = functional.rms_norm(x, (WIDTH,)) @ weights[f"qkv{i}"]
            query, key, value = made.view(len(x), -1, HEAD_DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
            x = x + self._attend(rows, kv, _turned(query, at), _turned(key, at), value) @ weights[f"out{i}"]
            gate, up = (functional.rms_norm(x, (WIDTH,)) @ weights[f"up{i}"]).chunk(2, -1)
            x = x + (functional.silu(gate) * up) @ weights[f"down{i}"]
        last = np.cumsum([row.stop - row.start for row in rows]) - 1
        tokens: list[int] = (functional.rms_norm(x[last], (WIDTH,)) @ weights["head"].T).argmax(-1).tolist()
        return tokens

    def _attend(
        self, rows: Sequence[Row], kv: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Each request attends to its own tokens so far. A kernel of paged attention does this loop in one call; see
        ``AsyncCache.block_table``."""
        made, first = [], 0
        for row in rows:
            end = first + row.stop - row.start
            at = np.arange(row.stop)
            pages, slots = torch.from_numpy(row.pages[at // PAGE]).long(), torch.from_numpy(at % PAGE)
            kv[pages[row.start :], 0, slots[row.start :]] = key[first:end]
            kv[pages[row.start :], 1, slots[row.start :]] = value[first:end]
            keys, values = (kv[pages, which, slots].transpose(0, 1) for which in (0, 1))
            seen = torch.from_numpy(at[row.start :, None] >= at)
            heads = functional.scaled_dot_product_attention(
                query[first:end].transpose(0, 1), keys, values, seen, enable_gqa=True
            )
            made.append(heads.transpose(0, 1).flatten(1))
            first = end
        return torch.cat(made)


def _turned(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rotary positions: turn ``x``, ``[tokens, heads, HEAD_DIM]``, by the angles of the positions ``at``."""
    angles = at[:, None, None] / 10_000 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    even, odd = x.chunk(2, -1)
    return torch.cat([even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()], -1)
