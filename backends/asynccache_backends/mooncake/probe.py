"""Asks whether a master answers. It is asked on the event loop before the client is used, because the client would hold
the GIL for seconds to find that out."""

from __future__ import annotations

import asyncio

from asynccache.errors import Timeout, Unavailable
from asynccache_backends.options import HostPort

WITHIN = 1.0

_HELLO = b"\x15" + bytes(19)  # the header of a request without a function: the master refuses it, so it answers


async def greet(master: HostPort, within: float = WITHIN) -> str:
    """Wait for an answer of the master, and return the address of this machine from which it was reached. Cancelling it
    closes the connection.

    Raises:
        Unavailable: the master cannot be reached.
        Timeout: it did not answer within ``within`` seconds.
    """
    try:
        async with asyncio.timeout(within):
            return await _exchange(master)
    except TimeoutError as error:
        raise Timeout(f"mooncake: master {master} does not answer") from error
    except OSError as error:
        raise Unavailable(f"mooncake: master {master} cannot be reached: {error.strerror or error}") from error


async def _exchange(master: HostPort) -> str:
    reader, writer = await asyncio.open_connection(master.host, master.port)
    try:
        host: str = writer.get_extra_info("sockname")[0]
        writer.write(_HELLO)
        await reader.read(1)  # any byte will do, and so will the end of the connection: the master has read the request
        return host
    finally:
        writer.transport.abort()
