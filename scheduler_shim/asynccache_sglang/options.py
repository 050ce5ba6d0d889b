"""What ``--hicache-storage-backend-extra-config`` may say to this backend: every name and value is checked.

SGLang passes on what it does not use itself. So an option that is misspelt would otherwise be silently ignored, and
with it a namespace or a deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.storage import parse_size

OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""What SGLang itself reads or adds; none of it is for us but ``interface_v1``."""

RANKS = ("tp_rank", "pp_rank", "dp_rank", "cp_rank")
"""What may stand in braces in a store's URL."""

STAGING = 256 << 20


@dataclass(frozen=True)
class Options:
    """The options, resolved.

    Attributes:
        storage: URLs of the stores, the nearest first. ``{tp_rank}``, ``{pp_rank}``, ``{dp_rank}`` and ``{cp_rank}`` in
            them become this rank's numbers.
        namespace: what stands for the weights in every key, in the user's words; None: a digest of the weights' files.
        model: the folder of the weights, or their name on the hub; None: the server's own ``--model-path``.
        timeout: seconds after which a batch of pages that are read or written is given up.
        lookup_timeout: seconds after which a question which pages are stored is given up.
        staging: bytes of memory for the pages on their way of each pool whose pages lie in several places.
        store_options: options for every URL that does not have them itself.
        interface_v1: whether SGLang was told to let the backend copy from and to its pools, which is faster.
    """

    storage: tuple[str, ...]
    namespace: str | None = None
    model: str | None = None
    timeout: float = 5.0
    lookup_timeout: float = 1.0
    staging: int = STAGING
    store_options: Mapping[str, str] = field(default_factory=dict)
    interface_v1: bool = False


OURS = ("storage", "namespace", "model", "timeout", "lookup_timeout", "staging", "store_options")


def resolve(extra: Mapping[str, Any] | None) -> Options:
    """The options in SGLang's extra config.

    Raises:
        ConfigError: a name or a value is unusable; nothing was opened.
    """
    given = dict(extra or {})
    unknown = sorted(set(map(str, given)) - OF_SGLANG - set(OURS))
    if unknown:
        raise ConfigError(f"extra config: {unknown[0]!r} is none of its options: {', '.join(OURS)}")
    made: dict[str, Any] = {"storage": _urls(given.get("storage"))}
    for name in ("namespace", "model"):
        if given.get(name) is not None:
            made[name] = checks.text(name, given[name], empty=False)
    for name in ("timeout", "lookup_timeout"):
        if given.get(name) is not None:
            made[name] = checks.number(name, given[name], above=0)
    if given.get("staging") is not None:
        made["staging"] = _bytes(given["staging"])
    if given.get("store_options") is not None:
        made["store_options"] = checks.texts("store_options", given["store_options"], numbers=True)
    return Options(**made, interface_v1=bool(given.get("interface_v1")))


def placed(urls: tuple[str, ...], ranks: Mapping[str, int], replicated: bool) -> tuple[str, ...]:
    """The URLs with this rank's numbers in place of their names in braces. ``replicated``: all ranks of one tensor
    parallel group read what the first one wrote.

    Raises:
        ConfigError: replicated pages would have a store by rank, where nobody but the first rank ever finds any.
    """
    if replicated and (bad := [url for url in urls if "{tp_rank}" in url]):
        raise ConfigError(
            f"storage={checks.shown(bad[0])}: the pages of this model are the same on every tensor parallel rank, and "
            f"only the first writes them, so {{tp_rank}} would leave the other ranks without any: name a store that "
            f"all ranks share, as in redis://HOST"
        )
    made = []
    for url in urls:
        for name in RANKS:
            url = url.replace(f"{{{name}}}", str(ranks[name]))
        made.append(url)
    return tuple(made)


def _urls(value: Any) -> tuple[str, ...]:
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, (list, tuple)) or not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(
            f"storage={checks.shown(value)} must be the URL of a store, or a list of them, the nearest first, as in "
            f"file:/var/kv?capacity=100GiB"
        )
    return tuple(urls)


def _bytes(value: Any) -> int:
    if isinstance(value, str):
        value = parse_size("staging", value)
    return checks.integer("staging", value, 1)
