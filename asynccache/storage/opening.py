"""From a URL to a store: backends are plug-ins, found by their entry points in the group ``asynccache.backends``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Protocol

from asynccache.errors import ConfigError
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import StorageBackend, StoreLayout
from asynccache.storage.url import ParsedUrl, parse_url

GROUP = "asynccache.backends"


class BackendClass(Protocol):
    """What an entry point of the group names."""

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """A ready backend, or ``ConfigError`` (the URL is wrong) or ``Unavailable`` (it cannot be opened now)."""
        ...


async def open_store(
    url: str,
    layout: StoreLayout,
    *,
    options: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> CheckedStore | None:
    """The store that ``url`` names, ready for use; None for ``none``. ``options`` are added to the URL's.

    Raises:
        ConfigError: the URL is wrong, or no installed backend serves its scheme.
        Unavailable: the backend cannot be opened now.

    Cancelling it leaves nothing open.
    """
    parsed = parse_url(url, options)
    if parsed.scheme == "none":
        return None
    backend = await backend_class(parsed.scheme).open(parsed, layout)
    return CheckedStore(backend, layout, timeout=timeout)


def backend_class(scheme: str) -> BackendClass:
    """The class that serves ``scheme``.

    Raises:
        ConfigError: none does; the message lists the schemes that are served.
    """
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in installed:
        names = ", ".join(sorted(installed)) or "none: is the distribution installed?"
        raise ConfigError(f"storage: unknown backend {scheme!r}; installed: {names}")
    loaded: BackendClass = installed[scheme].load()
    return loaded
