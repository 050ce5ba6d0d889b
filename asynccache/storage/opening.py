"""From a URL to a store: backends are plug-ins, found by their entry points in the group ``asynccache.backends``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from random import uniform
from typing import Protocol, runtime_checkable

from asynccache import checks
from asynccache.errors import ConfigError
from asynccache.redaction import redacted
from asynccache.storage.breaker import Breaker
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import StorageBackend, StoreLayout, check_layout
from asynccache.storage.options import StoreOptions, check_name, take_options
from asynccache.storage.url import ParsedUrl, parse_url

GROUP = "asynccache.backends"


class BackendClass(Protocol):
    """What an entry point of the group names."""

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """A ready backend, or ``ConfigError`` (the URL is wrong) or ``Unavailable`` (it cannot be opened now)."""
        ...


@runtime_checkable
class CheckableClass(Protocol):
    """A backend class that can tell from a URL alone what ``open`` would refuse of it. Optional: of a class without it
    only the scheme and the options that all stores have are checked before it is opened. A subclass that has an
    ``open`` of its own has a ``check`` of its own or none: the one that it inherits knows other options."""

    def check(self, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ``ConfigError`` that ``open`` would raise for the same arguments, as far as it can be known without
        making, opening or asking anything. ``open`` begins with the same check."""
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
    check_layout(layout)
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


def check_store(url: str, layout: StoreLayout, options: Mapping[str, str] | None = None) -> StoreOptions | None:
    """Refuse what ``open_store`` would refuse of ``url`` before it looks at anything: the scheme, the options and their
    values, hosts and ports. Nothing is made, opened or asked. Returns how the store is to be used; None for ``none``.

    Raises:
        ConfigError: the URL is wrong, or no installed backend serves its scheme.
    """
    parsed = parse_url(url, options)
    check_layout(layout)
    if parsed.scheme == "none":
        return None
    common, own = take_options(parsed)
    kind = backend_class(parsed.scheme)
    if isinstance(kind, CheckableClass) and _knows_its_options(kind):
        kind.check(own, layout)
    return common


def _knows_its_options(kind: CheckableClass) -> bool:
    """Whether its ``check`` was written for its ``open``, and not for one that a subclass has replaced since."""
    definitions = kind.__mro__ if isinstance(kind, type) else ()
    return next(("check" in vars(one) for one in definitions if {"open", "check"} & vars(one).keys()), True)


def check_stores(
    urls: Sequence[str], layout: StoreLayout, options: Mapping[str, str] | None = None
) -> list[ConfigError]:
    """What is wrong with ``urls``, which are to be used together, in their order; see ``check_store``. The first of
    these errors is the one that opening them would raise."""
    check_layout(layout)
    checks.instance("urls", urls, (list, tuple))
    errors: list[ConfigError] = []
    names: list[str] = []
    for url in urls:
        try:
            common = check_store(url, layout, options)
            if common is None:
                raise no_store(url)
            check_name(common.name, names)
            names.append(common.name)
        except ConfigError as error:
            errors.append(error)
    return errors


def no_store(url: str) -> ConfigError:
    """The error for a URL that stands for no store where one is needed."""
    return ConfigError(f"storage={redacted(url)!r}: there is nothing to attach")


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
