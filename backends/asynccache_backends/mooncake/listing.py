"""The names of all objects. The client has no call for that, so the master's admin server, which also serves its
metrics, is asked."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic

from asynccache.errors import Unavailable
from asynccache_backends.options import HostPort

WITHIN = 10.0
ANSWER_WITHIN = 60.0
MOST_BYTES = 1 << 30  # of an answer, for about ten million names
PIECE_BYTES = 1 << 20
PATH = "/get_all_keys"


def object_names(admin: HostPort) -> list[str]:
    """Ask the admin server for the names of all objects and return them. It blocks.

    Raises:
        Unavailable: the server cannot be asked, does not answer in time, or answers with more than ``MOST_BYTES``.
    """
    connection = HTTPConnection(admin.host, admin.port, timeout=WITHIN)
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        text = _body(admin, response).decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"mooncake: the admin server {admin} cannot be asked: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"mooncake: the admin server {admin} answered {response.status} to {PATH}")
    return text.split()


def _body(admin: HostPort, response: HTTPResponse) -> bytes:
    """Read the body of a response. Raises Unavailable if it is too long or takes too long."""
    parts, size, end = list[bytes](), 0, monotonic() + ANSWER_WITHIN
    while part := response.read1(PIECE_BYTES):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES or monotonic() > end:
            raise Unavailable(
                f"mooncake: the admin server {admin} has no end of its answer to {PATH}: {size} bytes so far"
            )
    return b"".join(parts)
