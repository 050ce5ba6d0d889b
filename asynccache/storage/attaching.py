"""Stores of several kinds made ready to be used together: URLs are opened, what somebody else made is borrowed.

Law: whoever opens a store and cannot attach it closes it again; what is refused by its URL leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asynccache.errors import ConfigError
from asynccache.storage.borrowed import Borrowed
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import StorageBackend, StoreLayout
from asynccache.storage.opening import check_stores, no_store, open_store
from asynccache.storage.options import StoreOptions, take_options
from asynccache.storage.tiers import Attached, TieredStore
from asynccache.storage.url import ParsedUrl, parse_url


def _parsed(storage: str | StorageBackend | CheckedStore, options: Mapping[str, str]) -> ParsedUrl:
    if isinstance(storage, str):
        return parse_url(storage, options)
    given = storage.backend if isinstance(storage, CheckedStore) else storage
    return ParsedUrl(type(given).__name__, options=options)


async def open_attached(
    storage: str | StorageBackend | CheckedStore, layout: StoreLayout, options: Mapping[str, str],
    check: Callable[[StoreOptions], None],
) -> Attached:  # fmt: skip
    """What ``storage`` stands for, ready to be attached: a URL is opened, and closed when it leaves; what somebody else
    made is left to its owner. ``check`` may refuse it before it is opened. Cancelling it leaves nothing open.

    Raises:
        ConfigError: the URL or an option is wrong, or the store is one for other pools.
        Unavailable: the backend cannot be opened now.
    """
    if isinstance(storage, str):
        common, _ = take_options(_parsed(storage, options))
        check(common)
        store = await open_store(storage, layout, options=options)
        if store is None:
            raise no_store(storage)
        return Attached(store, common)
    common, rest = take_options(_parsed(storage, options))
    rest.allow_only(())
    check(common)
    if not isinstance(storage, CheckedStore):
        store = CheckedStore(Borrowed(storage), layout, timeout=common.timeout, slow=common.slow,
                             concurrency=common.concurrency)  # fmt: skip
        return Attached(store, common)
    if storage.layout.page_bytes != layout.page_bytes:
        raise ConfigError(f"storage: {storage!r} is for pages of {dict(storage.layout.page_bytes)} bytes")
    return Attached(storage, common, owned=False)


async def open_all(
    store: TieredStore, storages: Sequence[str | StorageBackend | CheckedStore], layout: StoreLayout,
    options: Mapping[str, str],
) -> None:  # fmt: skip
    """Attach what ``storages`` stand for, nearest first. Whoever fails or is cancelled leaves open what is attached by
    then. Raises as ``open_attached``."""
    errors = check_stores([storage for storage in storages if isinstance(storage, str)], layout, options)
    if errors:
        raise errors[0]  # what is refused leaves no new store behind
    for storage in storages:
        attached = await open_attached(storage, layout, options, store.check)
        try:
            store.attach(attached)
        except BaseException:
            await close_unattached(attached)
            raise


async def close_unattached(attached: Attached) -> None:
    """It was opened for nothing. Cancelling it is up to the backend."""
    if attached.owned:
        await attached.store.aclose()
