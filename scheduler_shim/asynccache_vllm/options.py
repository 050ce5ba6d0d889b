"""The options that an entry of vLLM's ``secondary_tiers`` may have, checked. Plain values; imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from msgspec import Meta, field
from msgspec.structs import replace

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.settings import Positive, Settings

LOOKUP_TIMEOUT = 0.5


class TierOptions(Settings, frozen=True, kw_only=True):
    """The options, resolved."""

    storage: tuple[str, ...]
    """URLs of the stores, the nearest first."""
    namespace: Annotated[str, Meta(min_length=1)] | None = None
    """A text that stands for the weights in every key; None: a digest of the weights' files."""
    compatible_with: str | None = None
    """The version of vLLM that stands in the keys in place of this one, where a version does; None: this one. The user
    says with it that both store the same bytes."""
    lookup_timeout: Positive = LOOKUP_TIMEOUT
    """For how many seconds a request waits for stores that deliver nothing."""
    store_options: dict[str, str] = field(default_factory=dict)
    """Options for every URL that does not have them itself."""
    enable_kv_events: bool = False
    """Whether stored chunks are announced as vLLM's KV events."""
    locality: Literal["LOCAL", "REMOTE"] | None = None
    """Where the stores are, for vLLM's events and filters; None: not said."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """The options in ``given``: the keys of the entry, without ``type`` and those that vLLM itself reads.

        Raises:
            ConfigError: a key is unknown, or a value cannot be used; the message names it.
        """
        known, storage = sorted(cls.__struct_fields__), given.get("storage")
        if unknown := sorted(given.keys() - known):
            raise ConfigError(f"secondary tier asynccache: unknown key {unknown[0]!r}; there are {', '.join(known)}")
        if storage is None or storage in ([], ()):
            raise ConfigError("storage: no store is named; give a URL, as in file:/var/kv?capacity=100GiB, or several")
        values = {name: value for name, value in given.items() if value is not None}
        urls = storage if isinstance(storage, (list, tuple)) else [storage]
        values["storage"] = tuple(checks.text("storage", url, empty=False) for url in urls)
        if "compatible_with" in values:
            checks.version("compatible_with", values["compatible_with"])
        values["store_options"] = checks.texts("store_options", values.get("store_options", {}), numbers=True)
        return cls(**values)

    def placed(self, dp_rank: int) -> Self:
        """The same options, with ``dp_rank`` in place of ``{dp_rank}`` in each URL. Data parallel replicas each have a
        scheduler process of their own, and a ``file:`` store belongs to one process."""
        return replace(self, storage=tuple(url.replace("{dp_rank}", str(dp_rank)) for url in self.storage))
