"""The questions to a master that its client does not ask: whether it answers, and the names of all objects.

The master is asked for a sign of life on the event loop before the client is used, because the client would hold the
GIL for seconds to find that out. The names are asked of its admin server, which also serves its metrics.
"""

from __future__ import annotations

import asyncio
from http.client import HTTPConnection, HTTPException
from time import monotonic

from asynccache.errors import Timeout, Unavailable
from asynccache.storage import HostPort

GREET_WITHIN = 1.0

_HELLO = b"\x15" + bytes(19)  # the header of a request without a function: the master refuses it, so it answers
ADMIN_WITHIN = 10.0
LIST_WITHIN = 60.0
MOST_BYTES = 1 << 30  # of an answer, for about ten million names
PIECE_BYTES = 1 << 20
PATH = "/get_all_keys"


async def greet(master: HostPort, within: float = GREET_WITHIN) -> str:
    """Wait for an answer of the master, and return the address of this machine from which it was reached. Cancelling it
    closes the connection.

    Raises:
        Unavailable: the master cannot be reached.
        Timeout: it did not answer within ``within`` seconds.
    """
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(master.host, master.port)
            try:
                host: str = writer.get_extra_info("sockname")[0]
                writer.write(_HELLO)
                await reader.read(1)  # any byte will do, and so will the end: the master has read the request
                return host
            finally:
                writer.transport.abort()
    except TimeoutError as error:
        raise Timeout(f"mooncake: master {master} does not answer") from error
    except OSError as error:
        raise Unavailable(f"mooncake: master {master} cannot be reached: {error.strerror or error}") from error


def object_names(admin: HostPort) -> list[str]:
    """Ask the admin server for the names of all objects and return them. It blocks.

    Raises:
        Unavailable: the server cannot be asked, does not answer in time, or answers with more than ``MOST_BYTES``.
    """
    connection = HTTPConnection(admin.host, admin.port, timeout=ADMIN_WITHIN)
    body, end = bytearray(), monotonic() + LIST_WITHIN
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        while part := response.read1(PIECE_BYTES):
            body += part
            if len(body) > MOST_BYTES or monotonic() > end:
                raise Unavailable(
                    f"mooncake: the admin server {admin} has no end of its answer to {PATH}: {len(body)} bytes so far"
                )
    except (OSError, HTTPException) as error:
        raise Unavailable(f"mooncake: the admin server {admin} cannot be asked: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"mooncake: the admin server {admin} answered {response.status} to {PATH}")
    return body.decode("utf-8", "replace").split()
