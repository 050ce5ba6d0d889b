"""What each setting means, in a sentence, and between which bounds it lies. A test holds this against ``config.py``.

The bounds here are those that ``CacheConfig`` checks by itself: a file is held against them setting by setting, so
that every one that is wrong is named at once, with its line.
"""

from __future__ import annotations

from typing import NamedTuple


class Words(NamedTuple):
    """``low`` and ``high`` are allowed, ``above`` is not."""

    text: str
    low: float | None = None
    high: float | None = None
    above: float | None = None


_LAYERS = Words("Layers that the bytes are divided among, evenly.", above=0)
_COVERS = Words("For each of the layers the layer of the model that it belongs to, never falling; none: their own "
                "numbers.")
_DTYPE = Words("What the bytes are; part of the storage key, so that another dtype's pages are never read.")

CACHE = {
    "model": Words("Names the weights: part of every page hash, so caches of different models never meet in storage."),
    "page_size": Words("Tokens in a page, the unit of every tier.", above=0),
    "device": Words("Where the pages of the first tier are: `cpu`, `cuda:N`, `cuda:N?blocks=16` (see CUDA)."),
    "storage": Words("The third tier as a URL, for example `file:/var/kv?capacity=10GiB`, or several, nearest first "
                     "(in the environment with spaces between them); `none`: there is none."),
    "write_policy": Words("When pages are copied down: at once, after the second use, or when they would be lost."),
    "prefetch_policy": Words("How long a request waits for storage: not at all, until all is there, or for a time."),
    "eviction": Words("Which pages go first."),
    "prefetch_threshold": Words("Tokens that storage must hold beyond the host before a prefetch is worth it.", low=0),
    "prefetch_quota": Words("Share of the host's pages that prefetches may hold at one time.", low=0, high=1),
    "backup_quota": Words("Share of the host's pages that may wait for storage; beyond it the oldest are dropped.",
                          low=0, high=1),
    "prefetch_timeout_base": Words("Seconds that `timeout` waits, whatever the length.", low=0),
    "prefetch_timeout_per_1k": Words("Seconds that `timeout` adds for 1,024 tokens.", low=0),
    "prefetch_timeout_max": Words("Seconds that `timeout` waits at most.", above=0),
    "load_back_threshold": Words("Tokens below which a match on the host is computed again instead of loaded.", low=0),
    "max_backup_ops": Words("Copies from device to host that are in flight at one time.", above=0),
    "write_back_watermark": Words("Share of free device pages below which `write_back` begins.", low=0, high=1),
    "kept_fraction": Words("Share of the device's pages that `keep()` may pin.", low=0, high=1),
    "close_deadline": Words("Seconds that closing waits for what is still to be saved.", above=0),
    "freeze_gc": Words("Whether the tree is taken out of the garbage collector's sight as it grows."),
}

_ATTENTION = {
    "bytes_per_token": Words("KV of one token, all layers together; 0: slots without bytes.", low=0),
    "device_tokens": Words("Room on the device, in tokens: whole pages.", above=0),
    "host_tokens": Words("Room in host memory, in tokens: whole pages; 0: no host tier.", low=0),
    "layers": _LAYERS,
    "covers": _COVERS,
    "dtype": _DTYPE,
}

COMPONENTS = {
    "full": _ATTENTION,
    "swa": {"window": Words("Tokens that a position attends to.", above=0), **_ATTENTION},
    "mamba": {
        "state_bytes": Words("One recurrent state, all layers together.", above=0),
        "device_states": Words("Room on the device, in states.", above=0),
        "host_states": Words("Room in host memory, in states; 0: no host tier.", low=0),
        "layers": _LAYERS,
        "covers": _COVERS,
        "dtype": _DTYPE,
    },
}

COMPONENT_TEXT = {
    "full": "Full attention. Every cache has it.",
    "swa": "Sliding-window attention, beside full attention.",
    "mamba": "Recurrent states, beside full attention.",
}

SIDECAR = {
    "indices_from": Words("The component (`full`, `swa`, `mamba`) or sidecar whose page ids this pool uses."),
    "bytes_per_page": Words("Bytes of one page, all layers together.", above=0),
    "layers": _LAYERS,
    "covers": _COVERS,
    "hit_policy": Words("Which pages a hit needs; follows from `indices_from`, and is checked against it."),
    "replicated": Words("Whether every rank holds the same bytes, so that one stores them for all."),
    "dtype": _DTYPE,
}

SIDECARS_TEXT = "One table for each pool without slots of its own; the table's name is the pool's."
OPTIONS_TEXT = "Options of the storage backend, where there is one; they win over those in the URL. All are text."
