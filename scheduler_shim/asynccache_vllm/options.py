"""The options that an entry of vLLM's ``secondary_tiers`` may have, checked. Plain values; imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from asynccache import checks
from asynccache.errors import ConfigError

LOOKUP_TIMEOUT = 0.5
LOCALITIES = ("LOCAL", "REMOTE")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The options, resolved.

    storage: URLs of the stores, the nearest first.
    namespace: a text that stands for the weights in every key; None: a digest of the weights' files.
    compatible_with: the version of vLLM that stands in the keys in place of this one, where a version does; None: this
        one. The user says with it that both store the same bytes.
    lookup_timeout: for how many seconds a request waits for stores that deliver nothing.
    store_options: options for every URL that does not have them itself.
    events: whether stored chunks are announced as vLLM's KV events.
    locality: LOCAL or REMOTE, for vLLM's events and filters: where the stores are; None: not said.
    """

    storage: tuple[str, ...]
    namespace: str | None = None
    compatible_with: str | None = None
    lookup_timeout: float = LOOKUP_TIMEOUT
    store_options: Mapping[str, str] = field(default_factory=dict)
    events: bool = False
    locality: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Self:
        """The options in ``given``: the keys of the entry, without ``type`` and those that vLLM itself reads.

        Raises:
            ConfigError: a key is unknown, or a value cannot be used; the message names it.
        """
        unknown = given.keys() - KEYS
        if unknown:
            raise ConfigError(
                f"secondary tier asynccache: unknown key {sorted(unknown)[0]!r}; there are {', '.join(sorted(KEYS))}"
            )
        storage, namespace, locality = given.get("storage"), given.get("namespace"), given.get("locality")
        compatible = given.get("compatible_with")
        timeout, added = given.get("lookup_timeout", LOOKUP_TIMEOUT), given.get("store_options")
        if storage is None or storage in ([], ()):
            raise ConfigError("storage: no store is named; give a URL, as in file:/var/kv?capacity=100GiB, or several")
        urls = storage if isinstance(storage, (list, tuple)) else [storage]
        return cls(
            storage=tuple(checks.text("storage", url, empty=False) for url in urls),
            namespace=None if namespace is None else checks.text("namespace", namespace, empty=False),
            compatible_with=None if compatible is None else checks.version("compatible_with", compatible),
            lookup_timeout=checks.number("lookup_timeout", timeout, above=0),
            store_options={} if added is None else checks.texts("store_options", added, numbers=True),
            events=checks.flag("enable_kv_events", given.get("enable_kv_events", False)),
            locality=None if locality is None else checks.choice("locality", locality, LOCALITIES),
        )

    def placed(self, dp_rank: int) -> Self:
        """The same options, with ``dp_rank`` in place of ``{dp_rank}`` in each URL. Data parallel replicas each have a
        scheduler process of their own, and a ``file:`` store belongs to one process."""
        return replace(self, storage=tuple(url.replace("{dp_rank}", str(dp_rank)) for url in self.storage))


KEYS = frozenset(
    {"storage", "namespace", "compatible_with", "lookup_timeout", "store_options", "enable_kv_events", "locality"}
)
