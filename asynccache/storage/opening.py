"""From a URL to a store: backends are plug-ins, found by their entry points in the group ``asynccache.backends``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from random import uniform
from typing import Protocol

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.storage.breaker import Breaker
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import StorageBackend, StoreLayout
from asynccache.storage.options import StoreOptions, take_options
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
    timeout: float | None = None,
) -> CheckedStore | None:
    """The store that ``url`` names, ready for use; None for ``none``. ``options`` are added to the URL's. What they say
    of deadline, concurrency and slowness (``StoreOptions``) is for the ``CheckedStore``, and the backend does not see
    it; ``timeout``, if given, holds instead of theirs.

    Raises:
        ConfigError: the URL is wrong, or no installed backend serves its scheme.
        Unavailable: the backend cannot be opened now.

    Cancelling it leaves nothing open.
    """
    parsed = parse_url(url, options)
    checks.instance("layout", layout, StoreLayout)
    if timeout is not None:
        timeout = checks.number("timeout", timeout, above=0)
    if parsed.scheme == "none":
        return None
    common, own = take_options(parsed)
    if timeout is not None:
        common = replace(common, timeout=timeout)
    backend = await backend_class(parsed.scheme).open(own, layout)
    try:
        return checked(backend, layout, common)
    except BaseException:
        await backend.aclose()
        raise


def checked(backend: StorageBackend, layout: StoreLayout, options: StoreOptions) -> CheckedStore:
    """``backend`` behind deadline, places and breaker as ``options`` say. The breaker's back-offs are spread by a fifth
    either way, so that the servers that share a store which was away do not all come back at once."""
    breaker = Breaker(jitter=lambda: uniform(0.8, 1.2))
    return CheckedStore(
        backend, layout, timeout=options.timeout, slow=options.slow, concurrency=options.concurrency, breaker=breaker
    )


def check_served(url: str, options: Mapping[str, str] | None = None) -> None:
    """Whether there is a backend for ``url``.

    Raises:
        ConfigError: there is none, or it is no URL.
    """
    scheme = parse_url(url, options).scheme
    if scheme != "none":
        backend_class(scheme)


def backend_class(scheme: str) -> BackendClass:
    """The class that serves ``scheme``.

    Raises:
        ConfigError: none does; the message lists the schemes that are served.
    """
    checks.text("scheme", scheme)
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in installed:
        names = ", ".join(sorted(installed)) or "none: is the distribution installed?"
        raise ConfigError(f"storage: unknown backend {scheme!r}; installed: {names}")
    loaded: BackendClass = installed[scheme].load()
    return loaded
