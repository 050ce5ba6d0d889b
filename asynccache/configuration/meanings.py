"""What each setting means, in a sentence. Types, defaults and bounds are in ``config.py``."""

from __future__ import annotations

_LAYERS = "How many layers the pool has; its bytes are divided evenly among them."
_REPLICATED = "The ranks that hold the same bytes of every page, so that one of them stores the pages for all."
_COVERS = "For each of the layers the number of the model's layer that it holds, never falling; `[]`: 0, 1, 2, ..."
_DTYPE = "The type of the bytes; part of the storage key, so that pages of another dtype are never read."

CACHE = {
    "model": "A name for the weights; part of every page hash, so caches of different models never share stored pages.",
    "page_size": "Tokens in a page, the unit of every tier.",
    "device": "Where the pages of the first tier are: `cpu`, `cuda:N`, `cuda:N?blocks=16` (see CUDA).",
    "storage": ("The third tier: a URL such as `file:/var/kv?capacity=10GiB`, or several, nearest first (in the "
                "environment with spaces between them); `none`: there is no third tier."),
    "write_policy": "When pages are copied to the host and to storage: at once, after their second use, or when they "
                    "would be lost.",
    "prefetch_policy": "How long a request waits for storage: not at all, until all pages have arrived, or for a time.",
    "eviction": "The policy by which pages are evicted when a tier is full.",
    "prefetch_threshold": "How many tokens storage must hold beyond those on the host to make a prefetch worth it.",
    "prefetch_quota": "Share of the host's pages that prefetches may hold at one time.",
    "backup_quota": "Share of the host's pages that may wait for storage; beyond it the oldest are dropped.",
    "prefetch_timeout_base": "With `timeout`: seconds that a request waits for its prefetch, whatever the length.",
    "prefetch_timeout_per_1k": "With `timeout`: seconds that are added for each 1,024 tokens.",
    "prefetch_timeout_max": "With `timeout`: seconds that a request waits at most.",
    "load_back_threshold": "A match on the host of fewer tokens is computed again and not loaded.",
    "max_backup_ops": "How many copies from device to host are in flight at one time, at most.",
    "write_back_watermark": "Share of the smaller of device and host that the device keeps free or saved in advance.",
    "kept_fraction": "Share of the device's pages that `keep()` may pin.",
    "close_deadline": "Seconds that closing waits for pages that are still to be saved.",
    "freeze_gc": "Whether the garbage collector is told to leave out the tree as it grows.",
}

_ATTENTION = {
    "bytes_per_token": "Bytes of KV of one token, all layers together; 0: a pool with slots and without bytes.",
    "device_tokens": "Room on the device, in tokens; a multiple of `page_size`.",
    "host_tokens": "Room in host memory, in tokens; a multiple of `page_size`; 0: there is no host tier.",
    "layers": _LAYERS,
    "covers": _COVERS,
    "replicated": _REPLICATED,
    "dtype": _DTYPE,
}

COMPONENTS = {
    "full": _ATTENTION,
    "swa": {"window": "Tokens that a position attends to.", **_ATTENTION},
    "mamba": {
        "state_bytes": "Bytes of one recurrent state, all layers together.",
        "device_states": "Room on the device, in states.",
        "host_states": "Room in host memory, in states; 0: there is no host tier.",
        "layers": _LAYERS,
        "covers": _COVERS,
        "replicated": _REPLICATED,
        "dtype": _DTYPE,
    },
}

COMPONENT_TEXT = {
    "full": "Full attention. Every cache has it.",
    "swa": "Sliding-window attention, beside full attention.",
    "mamba": "Recurrent states, beside full attention.",
}

SIDECAR = {
    "indices_from": "The component (`full`, `swa`, `mamba`) or sidecar whose slots this pool uses.",
    "bytes_per_page": "Bytes of one page, all layers together.",
    "layers": _LAYERS,
    "covers": _COVERS,
    "hit_policy": "Which pages a hit needs. It follows from `indices_from`; if given, it is checked against that.",
    "replicated": _REPLICATED,
    "dtype": _DTYPE,
}

SIDECARS_TEXT = "One table for each pool without slots of its own. The table's name is the pool's name."
OPTIONS_TEXT = "Options of the store, if there is one store; they win over those in its URL. All values are text."
