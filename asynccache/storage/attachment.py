"""Opening and attaching stores: those that a URL names, and those that the caller made. Backends are plug-ins, found by
entry points of the group ``asynccache.backends``. A backend or a store that the caller made is not closed here.

A function that opens a store and cannot attach it closes it again. All URLs are checked before the first of them
is opened, so a wrong one leaves nothing behind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import count
from random import uniform
from typing import Protocol, runtime_checkable

import msgspec

from asynccache import checks
from asynccache.errors import AsyncCacheError, ConfigError
from asynccache.redaction import redacted
from asynccache.storage.checked import CheckedStore, breaker_of
from asynccache.storage.contract import StorageBackend, StoreLayout, check_layout
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.url import ParsedUrl, StoreOptions, check_name, parse_url, take_options
from asynccache.storage.wrapper import BorrowedBackend

GROUP = "asynccache.backends"
LONGEST_CLASS = 50
"""How many letters of a class's name its store's name takes. It may have 64, so there is room for a number."""

_NO_NAME = re.compile(r"^[^A-Za-z0-9]+|[^A-Za-z0-9_]+")  # parts of class names that a store's name may not have


class BackendClass(Protocol):
    """A backend class as an entry point of the group refers to it: a class, or anything else with this method."""

    async def open(self, url: ParsedUrl, layout: StoreLayout) -> StorageBackend:
        """Open the backend that ``url`` names and return it, ready for use.

        Raises:
            ConfigError: the URL is wrong.
            Unavailable: the backend cannot be opened now.
        """
        ...


@runtime_checkable
class CheckableClass(Protocol):
    """A backend class that can tell from a URL alone whether ``open`` would refuse it.

    This is optional. For a class without ``check``, only the scheme and the options that all stores have are checked
    before a store is opened. If a subclass overrides ``open`` and not ``check``, the inherited ``check`` is not called,
    because it knows the options of another ``open``.
    """

    def check(self, url: ParsedUrl, layout: StoreLayout) -> None:
        """Raise the ``ConfigError`` that ``open`` would raise for the same arguments, as far as that can be known
        without creating or opening anything. ``open`` begins with the same check."""
        ...


async def open_store(
    url: str,
    layout: StoreLayout,
    *,
    options: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> CheckedStore | None:
    """Open the store that ``url`` names and return it, ready for use; None for the URL ``none``.

    ``options`` are added to those in the URL and win over them. Those that all stores have (``StoreOptions``) are for
    the ``CheckedStore``; the backend sees only the others. ``timeout``, in seconds, wins over the option ``timeout``.

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
        common = msgspec.structs.replace(common, timeout=timeout)
    backend = await backend_class(parsed.scheme).open(own, layout)
    try:
        return checked(backend, layout, common)
    except BaseException:
        await backend.aclose()
        raise


def checked(backend: StorageBackend, layout: StoreLayout, options: StoreOptions) -> CheckedStore:
    """Put ``backend`` behind a ``CheckedStore`` with the settings of ``options``. Each back-off of its breaker is made
    up to a fifth shorter or longer at random, so that the servers that share a store do not all come back to it at the
    same moment."""
    breaker = breaker_of(backend, jitter=lambda: uniform(0.8, 1.2))
    return CheckedStore(
        backend, layout, timeout=options.timeout, slow=options.slow, concurrency=options.concurrency, breaker=breaker
    )


def check_store(url: str, layout: StoreLayout, options: Mapping[str, str] | None = None) -> StoreOptions | None:
    """Check ``url`` as ``open_store`` would: its scheme, its options and their values, hosts and ports. Nothing is
    created or opened, and no server is asked. Returns how the store is to be used; None for the URL ``none``.

    Raises:
        ConfigError: the URL is wrong, or no installed backend serves its scheme.
    """
    parsed = parse_url(url, options)
    check_layout(layout)
    if parsed.scheme == "none":
        return None
    common, own = take_options(parsed)
    kind = backend_class(parsed.scheme)
    if isinstance(kind, CheckableClass):
        definitions = kind.__mro__ if isinstance(kind, type) else ()
        nearest = next((one for one in definitions if {"open", "check"} & vars(one).keys()), None)
        if nearest is None or "check" in vars(nearest):
            kind.check(own, layout)
    return common


def check_stores(
    urls: Sequence[str], layout: StoreLayout, options: Mapping[str, str] | None = None
) -> list[ConfigError]:
    """Check several URLs of stores that are to be used together, each as ``check_store`` does. Returns an error for
    each URL that is wrong, in the order of ``urls``; the first is the one that opening them would raise."""
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
    """Return the error for the URL ``none`` where a store is needed."""
    return ConfigError(f"storage={redacted(url)!r}: there is nothing to attach")


def backend_class(scheme: str) -> BackendClass:
    """Return the backend class for URLs with this ``scheme``.

    Raises:
        ConfigError: no installed backend has this scheme; the message lists those that are installed. Or its module
            cannot be imported.
    """
    checks.text("scheme", scheme)
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if scheme not in installed:
        names = ", ".join(sorted(installed)) or "none: is the distribution installed?"
        raise ConfigError(f"storage: unknown backend {scheme!r}; installed: {names}")
    try:
        loaded: BackendClass = installed[scheme].load()
    except AsyncCacheError:
        raise
    except Exception as error:  # of a module that may be anybody's
        module = installed[scheme].value
        raise ConfigError(f"storage: backend {scheme!r} cannot be imported from {module}: {error!r}") from error
    return loaded


def _given(
    storage: StorageBackend | CheckedStore, options: Mapping[str, str], taken: Collection[str]
) -> ParsedUrl:
    """Return a URL with the options of a backend or store that the caller made. Unless ``options`` has a name, the
    store is called after the backend's class, with a number if that is one of the ``taken`` names: ``MemoryBackend``,
    ``MemoryBackend-2``."""
    kind = type(storage.backend if isinstance(storage, CheckedStore) else storage).__name__
    name = first = _NO_NAME.sub("", kind)[:LONGEST_CLASS] or StoreOptions().name
    for number in count(2):
        if name not in taken:
            break
        name = f"{first}-{number}"
    return ParsedUrl(kind, options={"name": name, **options})


async def open_attached(
    storage: str | StorageBackend | CheckedStore, layout: StoreLayout, options: Mapping[str, str],
    tiers: TieredStore, position: int | None = None, taken: Collection[str] = (),
) -> AttachedStore:  # fmt: skip
    """Return the store that ``storage`` stands for, ready to be attached to ``tiers`` at ``position``. ``taken``: names
    that no store gets from its class, besides those of the stores in ``tiers``.

    A URL is opened, and its store will be closed when it is detached. A backend or a store that somebody else made is
    never closed here. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the URL or an option is wrong, the given store is for pages of other sizes, another store has this
            name, or there is no such position.
        Unavailable: the backend cannot be opened now.
    """
    if isinstance(storage, str):
        common, _ = take_options(parse_url(storage, options))
        tiers.check(common, position)
        store = await open_store(storage, layout, options=options)
        if store is None:
            raise no_store(storage)
        return AttachedStore(store, common)
    common, rest = take_options(_given(storage, options, {*tiers.names, *taken}))
    rest.allow_only(())
    tiers.check(common, position)
    if not isinstance(storage, CheckedStore):
        store = CheckedStore(BorrowedBackend(storage), layout, timeout=common.timeout, slow=common.slow,
                             concurrency=common.concurrency)  # fmt: skip
        return AttachedStore(store, common)
    if storage.layout.page_bytes != layout.page_bytes:
        raise ConfigError(f"storage: {storage!r} is for pages of {dict(storage.layout.page_bytes)} bytes")
    return AttachedStore(storage, common, owned=False)


async def open_all(
    store: TieredStore, storages: Sequence[str | StorageBackend | CheckedStore], layout: StoreLayout,
    options: Mapping[str, str],
) -> None:  # fmt: skip
    """Open and attach ``storages`` to ``store``, the nearest first.

    If it fails or is cancelled, the stores that were attached by then stay attached and open: closing ``store`` closes
    them. Raises as ``open_attached``.
    """
    errors = check_stores([storage for storage in storages if isinstance(storage, str)], layout, options)
    if errors:
        raise errors[0]
    for storage in storages:
        attached = await open_attached(storage, layout, options, store)
        try:
            store.attach(attached)
        except BaseException:
            await close_unattached(attached)
            raise


async def close_unattached(attached: AttachedStore) -> None:
    """Close a store that was opened here and will not be attached. Cancelling it is up to the backend."""
    if attached.owned:
        await attached.store.aclose()
