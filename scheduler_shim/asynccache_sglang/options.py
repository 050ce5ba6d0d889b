"""The options of this backend in ``--hicache-storage-backend-extra-config``. Every name and value is checked.

SGLang hands over every name that it does not use itself. Without these checks a misspelt option would be ignored
silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, field

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.settings import Positive, Settings, parse_size

OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "allocator", "file_storage_path"})
"""Names that SGLang itself reads or adds. This backend only reads ``interface_v1`` of them, which must be 1: without it
SGLang would copy each page twice."""

RANKS = ("tp_rank", "pp_rank", "dp_rank", "cp_rank")
"""Names that may stand in braces in a store's URL."""

Text = Annotated[str, Meta(min_length=1)]


class SglangOptions(Settings, frozen=True):
    """The options, resolved."""

    storage: tuple[str, ...]
    """URLs of the stores, the nearest first. ``{tp_rank}``, ``{pp_rank}``, ``{dp_rank}`` and ``{cp_rank}`` in them
    become this rank's numbers."""
    namespace: Text | None = None
    """A text of the user's that stands for the weights in every key; None: a digest of the weights' files."""
    model: Text | None = None
    """The folder of the weights, or their name on the hub; None: the server's own ``--model-path``."""
    timeout: Positive = 5.0
    """Seconds after which a batch of pages that are read or written is given up."""
    lookup_timeout: Positive = 1.0
    """Seconds after which asking the stores for pages is given up."""
    staging: Annotated[int, Meta(ge=1, extra={"parse": parse_size})] = 256 << 20
    """Bytes of memory that each pool has for pages on their way, if its pages lie in several places."""
    store_options: dict[str, str] = field(default_factory=dict)
    """Options for every URL that does not have them itself."""
    compatible_with: str | None = None
    """The version of SGLang that stands in the keys in place of this one, where a version does; None: this one. The
    user says with it that both store the same bytes."""


def resolve(extra: Mapping[str, Any] | None) -> SglangOptions:
    """The options in SGLang's extra config.

    Raises:
        ConfigError: a name is unknown or a value cannot be used.
    """
    given, known = {str(name): value for name, value in (extra or {}).items()}, SglangOptions.__struct_fields__
    if unknown := sorted(given.keys() - OF_SGLANG - set(known)):
        raise ConfigError(f"extra config: there is no option {unknown[0]!r}; there are {', '.join(known)}")
    if not given.get("interface_v1"):
        raise ConfigError('extra config: set "interface_v1": 1, so that the stores read and write SGLang\'s own pools')
    named = given.get("storage")
    urls = [named] if isinstance(named, str) else named
    if not isinstance(urls, (list, tuple)) or not urls or not all(isinstance(url, str) and url for url in urls):
        raise ConfigError(
            f"storage={checks.shown(named)} must be the URL of a store, or a list of them, the nearest first, as in "
            f"file:/var/kv?capacity=100GiB"
        )
    values = {name: given[name] for name in known if given.get(name) is not None} | {"storage": tuple(urls)}
    if "compatible_with" in values:
        checks.version("compatible_with", values["compatible_with"])
    values["store_options"] = checks.texts("store_options", values.get("store_options", {}), numbers=True)
    return SglangOptions(**values)


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
