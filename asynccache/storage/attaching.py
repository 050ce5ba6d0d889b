"""Opens and attaches stores: a URL is opened here, a backend or a store that the caller made is only borrowed.

Laws: whoever opens a store and cannot attach it closes it again. All URLs are checked before the first of them is
opened, so a wrong one leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asynccache.errors import ConfigError
from asynccache.storage.checked import CheckedStore
from asynccache.storage.contract import StorageBackend, StoreLayout
from asynccache.storage.opening import check_stores, no_store, open_store
from asynccache.storage.options import StoreOptions, take_options
from asynccache.storage.tiers import AttachedStore, TieredStore
from asynccache.storage.url import ParsedUrl, parse_url
from asynccache.storage.wrapping import BorrowedBackend


def _parsed(storage: str | StorageBackend | CheckedStore, options: Mapping[str, str]) -> ParsedUrl:
    if isinstance(storage, str):
        return parse_url(storage, options)
    given = storage.backend if isinstance(storage, CheckedStore) else storage
    return ParsedUrl(type(given).__name__, options=options)


async def open_attached(
    storage: str | StorageBackend | CheckedStore, layout: StoreLayout, options: Mapping[str, str],
    check: Callable[[StoreOptions], None],
) -> AttachedStore:  # fmt: skip
    """Return the store that ``storage`` stands for, ready to be attached.

    A URL is opened, and its store will be closed when it is detached. A backend or a store that somebody else made is
    never closed here. ``check`` is called with the store's options before anything is opened and may raise.
    Cancelling it leaves nothing open.

    Raises:
        ConfigError: the URL or an option is wrong, or the given store is for pools with other sizes.
        Unavailable: the backend cannot be opened now.
    """
    if isinstance(storage, str):
        common, _ = take_options(_parsed(storage, options))
        check(common)
        store = await open_store(storage, layout, options=options)
        if store is None:
            raise no_store(storage)
        return AttachedStore(store, common)
    common, rest = take_options(_parsed(storage, options))
    rest.allow_only(())
    check(common)
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
        attached = await open_attached(storage, layout, options, store.check)
        try:
            store.attach(attached)
        except BaseException:
            await close_unattached(attached)
            raise


async def close_unattached(attached: AttachedStore) -> None:
    """Close a store that was opened here and will not be attached. Cancelling it is up to the backend."""
    if attached.owned:
        await attached.store.aclose()
