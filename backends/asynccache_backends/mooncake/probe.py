"""Is a master there? Asked on the loop, before the client is, which would hold the GIL for seconds to find out."""

from __future__ import annotations

import asyncio

from asynccache.errors import Timeout, Unavailable
from asynccache_backends.mooncake.settings import Place

WITHIN = 1.0

_HELLO = b"\x15" + bytes(19)                       # the header of a request for no function: refused, but answered


async def greet(master: Place, within: float = WITHIN) -> str:
    """This machine's address as the master sees it, once the master has answered.

    Raises:
        Unavailable: nobody listens there.
        Timeout: no answer in ``within`` seconds: it hangs. Cancelling it closes the connection.
    """
    try:
        async with asyncio.timeout(within):
            return await _exchange(master)
    except TimeoutError as error:
        raise Timeout(f"mooncake: master {master} does not answer") from error
    except OSError as error:
        raise Unavailable(f"mooncake: master {master} cannot be reached: {error.strerror or error}") from error


async def _exchange(master: Place) -> str:
    reader, writer = await asyncio.open_connection(master.host, master.port)
    try:
        host: str = writer.get_extra_info("sockname")[0]
        writer.write(_HELLO)
        await reader.read(1)  # whatever comes, be it the end: somebody has read what was sent
        return host
    finally:
        writer.transport.abort()
