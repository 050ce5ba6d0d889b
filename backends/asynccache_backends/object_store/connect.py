"""The client for a URL, and the check of the URL's options.

    s3://BUCKET/PREFIX?endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://BUCKET/PREFIX    az://CONTAINER/PREFIX?account=NAME

Credentials come only from the environment, as the client library reads it: ``AWS_ACCESS_KEY_ID`` and the variables that
belong to it, an instance's role, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_KEY`` and so on. A URL can
be seen in process lists, logs and reports. So an option that looks like a secret is refused, and the error does not
show its value.
"""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Annotated, Any

from msgspec import Meta

from asynccache.errors import ConfigError
from asynccache.redaction import is_secret
from asynccache.redaction import redacted as redacted_url
from asynccache.settings import Seconds, Settings
from asynccache.storage import ParsedUrl, parse_host_port, parse_size
from asynccache_backends.object_store.client import ObjectClient, redacted, require_obstore

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
    """The options of a URL. Those that ``PLACES`` has are for some schemes only.

    ``pack``: bytes of a full pack. ``refresh``: seconds between two looks for packs of other processes; 0: they are
    looked for only at opening. ``parallel``: how many requests of a kind are made at a time. ``request_timeout``:
    seconds that a request may take.
    """

    pack: Annotated[int, Meta(ge=64 << 10, le=256 << 20, extra={"parse": parse_size})] = 4 << 20
    refresh: Seconds = 5.0
    parallel: Annotated[int, Meta(ge=1, le=999_999)] = 16
    request_timeout: Annotated[float, Meta(ge=0.1, le=86_400)] = 30.0
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
