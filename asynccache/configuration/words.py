"""What each setting means, in a sentence. A test holds this against ``config.py``, which says what it may be."""

from __future__ import annotations

_LAYERS = "Layers that the bytes are divided among, evenly."
_REPLICATED = "Over which ranks every page has the same bytes, so that one of them stores them for all."
_COVERS = (
    "For each of the layers the layer of the model that it belongs to, never falling; none: their own "
    "numbers."
)
_DTYPE = "What the bytes are; part of the storage key, so that another dtype's pages are never read."

CACHE = {
    "model": "Names the weights: part of every page hash, so caches of different models never meet in storage.",
    "page_size": "Tokens in a page, the unit of every tier.",
    "device": "Where the pages of the first tier are: `cpu`, `cuda:N`, `cuda:N?blocks=16` (see CUDA).",
    "storage": ("The third tier as a URL, for example `file:/var/kv?capacity=10GiB`, or several, nearest first "
                "(in the environment with spaces between them); `none`: there is none."),
    "write_policy": "When pages are copied down: at once, after the second use, or when they would be lost.",
    "prefetch_policy": "How long a request waits for storage: not at all, until all is there, or for a time.",
    "eviction": "Which pages go first.",
    "prefetch_threshold": "Tokens that storage must hold beyond the host before a prefetch is worth it.",
    "prefetch_quota": "Share of the host's pages that prefetches may hold at one time.",
    "backup_quota": "Share of the host's pages that may wait for storage; beyond it the oldest are dropped.",
    "prefetch_timeout_base": "Seconds that `timeout` waits, whatever the length.",
    "prefetch_timeout_per_1k": "Seconds that `timeout` adds for 1,024 tokens.",
    "prefetch_timeout_max": "Seconds that `timeout` waits at most.",
    "load_back_threshold": "Tokens below which a match on the host is computed again instead of loaded.",
    "max_backup_ops": "Copies from device to host that are in flight at one time.",
    "write_back_watermark": "Share of the smaller of device and host that the device keeps free or saved ahead.",
    "kept_fraction": "Share of the device's pages that `keep()` may pin.",
    "close_deadline": "Seconds that closing waits for what is still to be saved.",
    "freeze_gc": "Whether the tree is taken out of the garbage collector's sight as it grows.",
}

_ATTENTION = {
    "bytes_per_token": "KV of one token, all layers together; 0: slots without bytes.",
    "device_tokens": "Room on the device, in tokens: whole pages.",
    "host_tokens": "Room in host memory, in tokens: whole pages; 0: no host tier.",
    "layers": _LAYERS,
    "covers": _COVERS,
    "replicated": _REPLICATED,
    "dtype": _DTYPE,
}

COMPONENTS = {
    "full": _ATTENTION,
    "swa": {"window": "Tokens that a position attends to.", **_ATTENTION},
    "mamba": {
        "state_bytes": "One recurrent state, all layers together.",
        "device_states": "Room on the device, in states.",
        "host_states": "Room in host memory, in states; 0: no host tier.",
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
    "indices_from": "The component (`full`, `swa`, `mamba`) or sidecar whose page ids this pool uses.",
    "bytes_per_page": "Bytes of one page, all layers together.",
    "layers": _LAYERS,
    "covers": _COVERS,
    "hit_policy": "Which pages a hit needs; follows from `indices_from`, and is checked against it.",
    "replicated": _REPLICATED,
    "dtype": _DTYPE,
}

SIDECARS_TEXT = "One table for each pool without slots of its own; the table's name is the pool's."
OPTIONS_TEXT = "Options of the storage backend, where there is one; they win over those in the URL. All are text."
