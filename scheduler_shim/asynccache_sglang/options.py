"""The options of this backend in ``--hicache-storage-backend-extra-config``. Every name and value is checked.

SGLang hands over every name that it does not use itself. Without these checks a misspelt option would be ignored
silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.storage import parse_size

OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""Names that SGLang itself reads or adds. This backend only reads ``interface_v1`` of them, which must be 1: without it
SGLang would copy each page twice."""

RANKS = ("tp_rank", "pp_rank", "dp_rank", "cp_rank")
"""Names that may stand in braces in a store's URL."""

STAGING = 256 << 20


@dataclass(frozen=True)
class SglangOptions:
    """The options, resolved.

    Attributes:
        storage: URLs of the stores, the nearest first. ``{tp_rank}``, ``{pp_rank}``, ``{dp_rank}`` and ``{cp_rank}`` in
            them become this rank's numbers.
        namespace: a text of the user's that stands for the weights in every key; None: a digest of the weights' files.
        compatible_with: the version of SGLang that stands in the keys in place of this one, where a version does; None:
            this one. The user says with it that both store the same bytes.
        model: the folder of the weights, or their name on the hub; None: the server's own ``--model-path``.
        timeout: seconds after which a batch of pages that are read or written is given up.
        lookup_timeout: seconds after which asking the stores for pages is given up.
        staging: bytes of memory that each pool has for pages on their way, if its pages lie in several places.
        store_options: options for every URL that does not have them itself.
    """

    storage: tuple[str, ...]
    namespace: str | None = None
    model: str | None = None
    timeout: float = 5.0
    lookup_timeout: float = 1.0
    staging: int = STAGING
    store_options: Mapping[str, str] = field(default_factory=dict)
    compatible_with: str | None = None


OURS = ("storage", "namespace", "compatible_with", "model", "timeout", "lookup_timeout", "staging", "store_options")


def resolve(extra: Mapping[str, Any] | None) -> SglangOptions:
    """The options in SGLang's extra config.

    Raises:
        ConfigError: a name is unknown or a value cannot be used.
    """
    given = dict(extra or {})
    unknown = sorted(set(map(str, given)) - OF_SGLANG - set(OURS))
    if unknown:
        raise ConfigError(f"extra config: there is no option {unknown[0]!r}; there are {', '.join(OURS)}")
    if not given.get("interface_v1"):
        raise ConfigError('extra config: set "interface_v1": 1, so that the stores read and write SGLang\'s own pools')
    named = given.get("storage")
    urls = [named] if isinstance(named, str) else named
    if not isinstance(urls, (list, tuple)) or not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(
            f"storage={checks.shown(named)} must be the URL of a store, or a list of them, the nearest first, as in "
            f"file:/var/kv?capacity=100GiB"
        )
    made: dict[str, Any] = {"storage": tuple(urls)}
    for name in ("namespace", "model"):
        if given.get(name) is not None:
            made[name] = checks.text(name, given[name], empty=False)
    if (compatible := given.get("compatible_with")) is not None:
        made["compatible_with"] = checks.version("compatible_with", compatible)
    for name in ("timeout", "lookup_timeout"):
        if given.get(name) is not None:
            made[name] = checks.number(name, given[name], above=0)
    if (staging := given.get("staging")) is not None:
        size = parse_size("staging", staging) if isinstance(staging, str) else staging
        made["staging"] = checks.integer("staging", size, 1)
    if given.get("store_options") is not None:
        made["store_options"] = checks.texts("store_options", given["store_options"], numbers=True)
    return SglangOptions(**made)


def placed(urls: tuple[str, ...], ranks: Mapping[str, int], replicated: bool) -> tuple[str, ...]:
    """The URLs with this rank's numbers in place of the names in braces. ``replicated``: the pages of all ranks of a
    tensor parallel group are the same, and only the first rank writes them.

    Raises:
        ConfigError: pages are replicated and a URL has ``{tp_rank}``; then only the first rank would find any page.
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
