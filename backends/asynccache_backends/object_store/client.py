"""The requests to a store below one prefix, and their errors. This module knows nothing of packs.

The client library tries a request that fails up to two times more, with back-off; nothing is tried again here. A
missing object raises ``FileNotFoundError``, a read beyond an object's end ``EOFError``, and a full store ``NoRoom``.
All else raises ``Unavailable``. Its message is one line without the query of any URL, since a query may have a
signature in it.

Cancelling an await here ends the request. The library drops it within milliseconds, and lets go of its buffers then.

The client for a URL, and the check of the URL's options:

    s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://BUCKET/PREFIX    az://CONTAINER/PREFIX?account=NAME

Credentials come only from the environment, as the client library reads it: ``AWS_ACCESS_KEY_ID`` and the variables that
belong to it, an instance's role, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY`` and so on. A URL can
be seen in process lists, logs and reports. So an option that looks like a secret is refused, and the error does not
show its value.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from msgspec import Meta

from asynccache.errors import ConfigError, Unavailable
from asynccache.extras import install
from asynccache.redaction import is_secret
from asynccache.redaction import redacted as redacted_url
from asynccache.settings import Seconds, Settings
from asynccache.storage import ParsedUrl, parse_host_port, parse_size

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined, unused-ignore]

    from obstore.store import ObjectStore


LIST_CHUNK = 1000

_QUERY = re.compile(r"\?[^\s'\")]*")
# The library has no errors of its own for these two, and each kind of server words them in its own way.
_BEYOND = re.compile(r"\b416 |InvalidRange|range was invalid|Invalid range")
_FULL = re.compile(
    r"QuotaExceeded|StorageFull|InsufficientStorage|status code: 507|No space left on device|Disk quota exceeded"
)
_LONGEST = 300


class NoRoom(Unavailable):
    """The store answers, and is full."""


class ListedObject(NamedTuple):
    """An object in a list. ``name`` is without the folder. ``size`` is in bytes. ``written`` is the unix time at which
    it was stored, by the store's clock."""

    name: str
    size: int
    written: float


class ObjectClient:
    """Makes requests to ``store`` for objects below ``prefix``. ``shown`` is what errors call the store."""

    def __init__(self, store: ObjectStore, prefix: str, shown: str) -> None:
        self.shown = shown
        self._store = store
        self._api = require_obstore()
        self._prefix = prefix

    def __repr__(self) -> str:
        return f"ObjectClient({self.shown!r})"

    def put(self, path: str, data: Buffer | Sequence[Buffer]) -> asyncio.Future[Any]:
        """Begin to store a new object; it never replaces one. Returns the request, to be awaited by ``created``. Until
        the request has let go of the buffers (see ``RequestBuffers``) they must not change."""
        future = self._api.put_async(self._store, self._prefix + path, data, use_multipart=False, mode="create")
        return cast(asyncio.Future[Any], future)

    async def answer(self, request: asyncio.Future[Any]) -> Any:
        """Wait for a request and return its result.

        Raises:
            FileNotFoundError: there is no such object.
            Unavailable: it failed for another reason.
        """
        try:
            return await request
        except FileNotFoundError:
            raise
        except Exception as error:
            raise Unavailable(self._said(error)) from None

    async def create(self, path: str, data: Buffer | Sequence[Buffer]) -> None:
        """Store a new object. When this returns it is stored durably. If it is cancelled, it may be stored or not.
        Raises as ``created`` does."""
        await self.created(path, self.put(path, data))

    async def created(self, path: str, request: asyncio.Future[Any]) -> None:
        """Wait for the request of a ``put`` of ``path``. It is a success, too, if the store says that the object
        exists: no name is used twice, so an earlier attempt of the same request has stored it.

        Raises:
            NoRoom: the store is full.
            Unavailable: it failed for another reason.
        """
        try:
            with suppress(self._api.exceptions.AlreadyExistsError):
                await request
        except Exception as error:
            raise (NoRoom if _FULL.search(str(error)) else Unavailable)(self._said(error)) from None

    async def read(self, path: str, start: int, length: int) -> Any:
        """Read ``length`` bytes of an object from ``start`` on. Returns them as a buffer, which is shorter if the
        object ends earlier.

        Raises:
            EOFError: the object ends before ``start``. Other errors are those of ``answer``.
        """
        try:
            whole = self._prefix + path
            return await self.answer(self._api.get_range_async(self._store, whole, start=start, length=length))
        except Unavailable as error:
            if _BEYOND.search(str(error)):
                raise EOFError(path) from None
            raise

    async def read_all(self, path: str) -> Any:
        """Read a whole object and return it as a buffer. Raises as ``answer`` does."""
        found = await self.answer(self._api.get_async(self._store, self._prefix + path))
        return await self.answer(found.bytes_async())

    async def size(self, path: str) -> int:
        """Return the size of an object in bytes. Raises as ``answer`` does."""
        found = await self.answer(self._api.head_async(self._store, self._prefix + path))
        return int(found["size"])

    async def list(self, folder: str, after: str = "") -> AsyncIterator[list[ListedObject]]:
        """Yield the objects in a folder whose names sort after ``after``, in batches. Raises Unavailable."""
        base = f"{self._prefix}{folder}/"
        stream = self._api.list(self._store, base, offset=base + after if after else None, chunk_size=LIST_CHUNK)
        while True:
            try:
                found = await anext(stream)
            except (StopAsyncIteration, FileNotFoundError):
                return
            except Exception as error:
                raise Unavailable(self._said(error)) from None
            yield [ListedObject(o["path"][len(base) :], o["size"], o["last_modified"].timestamp()) for o in found]

    async def delete(self, paths: Sequence[str]) -> None:
        """Remove objects; a missing one is no error. Cancelling it may leave some of them. Raises Unavailable."""
        whole = [self._prefix + path for path in paths]
        if not whole:
            return
        try:
            await self.answer(self._api.delete_async(self._store, whole))
        except FileNotFoundError:  # some stores stop at the first missing object and leave the others
            for path in whole:
                try:
                    await self.answer(self._api.delete_async(self._store, path))
                except FileNotFoundError:
                    continue

    def _said(self, error: Exception) -> str:
        return f"{self.shown}: {redacted(error)}"


def redacted(error: Exception) -> str:
    """Return the class of an error and the first line of its text, without the query of any URL."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {_QUERY.sub('?...', text)[:_LONGEST]}"


def require_obstore() -> Any:
    """Import and return the client library.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError(f"object stores need obstore: {install('object')} ({error})") from None
    return obstore


OPTIONS = ("pack", "refresh", "parallel", "request_timeout")
PLACES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "s3": ("S3Store", {"endpoint": "endpoint", "region": "region"}),
    "gs": ("GCSStore", {"endpoint": "base_url"}),
    "az": ("AzureStore", {"endpoint": "endpoint", "account": "account_name"}),
}
"""For each scheme the class of the client library, and the scheme's own options with the library's name for each."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9$._-]{0,254}")
_CONNECT = timedelta(seconds=5)
_BACKOFF = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1)}
_RETRY = {"max_retries": 2, "backoff": _BACKOFF}
_LINGER = 0.05


def _endpoint(name: str, text: str) -> str:
    scheme, _, rest = text.partition("://")
    host, _, path = rest.partition("/")
    known = scheme in ("http", "https") and parse_host_port(host, 443) is not None
    if not known or not path.isprintable() or " " in path:
        wanted = "http:// or https://, a host and maybe a port, as in endpoint=http://127.0.0.1:9000"
        raise ConfigError(f"{name}={redacted_url(text)!r}: expected {wanted}")
    return text


def _name(name: str, text: str) -> str:
    if _NAME.fullmatch(text) is None:
        raise ConfigError(f"{name}={redacted_url(text)!r}: expected a name of letters and digits, as in eu-west-1")
    return text


class ObjectSettings(Settings, frozen=True):
    """The options of a URL. Those that ``PLACES`` has are for some schemes only."""

    pack: Annotated[int, Meta(ge=64 << 10, le=256 << 20, extra={"parse": parse_size})] = 4 << 20
    """Bytes of a full pack."""
    refresh: Seconds = 5.0
    """Seconds between two looks for packs of other processes; 0: they are looked for only at opening."""
    parallel: Annotated[int, Meta(ge=1, le=999_999)] = 16
    """How many requests of a kind are made at a time."""
    request_timeout: Annotated[float, Meta(ge=0.1, le=86_400)] = 30.0
    """Seconds that a request may take."""
    endpoint: Annotated[str, Meta(extra={"parse": _endpoint})] = ""
    region: Annotated[str, Meta(extra={"parse": _name})] = ""
    account: Annotated[str, Meta(extra={"parse": _name})] = ""


def settings_of(url: ParsedUrl) -> ObjectSettings:
    """Return the settings in ``url``.

    Raises:
        ConfigError: an option is unknown, unusable or a secret.
    """
    for name, text in url.options.items():
        if is_secret(name) or (name == "endpoint" and "@" in text):
            raise ConfigError(
                f"storage={url.scheme}: option {name!r} would put a secret into a URL; credentials come from the "
                "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY...)"
            )
    if "capacity" in url.options:
        raise ConfigError(f"storage={url.scheme}: there is no capacity: a lifetime rule of the bucket bounds its size")
    url.allow_only((*OPTIONS, *PLACES[url.scheme][1]))
    return url.settings(ObjectSettings)


def connect(url: ParsedUrl, settings: ObjectSettings) -> ObjectClient:
    """Return a client for ``url``. Nothing is sent yet.

    Raises:
        ConfigError: the client library is missing, the URL names no bucket, or the library refuses its options.
    """
    kind, names = PLACES[url.scheme]
    make = getattr(require_obstore().store, kind)
    place, prefix = place_of(url)
    timeout = timedelta(seconds=settings.request_timeout)
    client: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT)}
    if settings.endpoint.startswith("http://"):
        client["allow_http"] = True
    chosen = {names[name]: value for name, value in url.options.items() if name in names}
    try:
        store = make(place, client_options=client, retry_config={**_RETRY, "retry_timeout": timeout}, **chosen)
    except Exception as error:
        raise ConfigError(f"storage={url.scheme}:{place}: {redacted(error)}") from None
    _linger_at_exit()
    return ObjectClient(store, f"{prefix}/" if prefix else "", f"{url.scheme}:{url.path}")


def place_of(url: ParsedUrl) -> tuple[str, str]:
    """Return the bucket of ``url``, and the prefix in it without slashes at its ends.

    Raises:
        ConfigError: the URL names no bucket, or one of the two is no possible name.
    """
    place, _, prefix = url.path.partition("/")
    if not place:
        raise ConfigError(f"storage={url.scheme}: names no bucket")
    if _BUCKET.fullmatch(place) is None:
        raise ConfigError(f"storage={str(url)!r}: the part before the first '/' is no name of a bucket")
    prefix = prefix.strip("/")
    if prefix and ({"", ".", ".."} & set(prefix.split("/")) or not prefix.isprintable()):
        raise ConfigError(f"storage={str(url)!r}: the prefix has an empty part, '.', '..' or odd characters")
    return place, prefix


@cache
def _linger_at_exit() -> None:
    """Make the process wait for a moment at its end. The library's threads need the GIL to pass results to the event
    loop. A thread that still waits for it while the interpreter ends aborts the process (seen with version 0.12)."""
    atexit.register(time.sleep, _LINGER)
