"""The names of all objects, asked of the master's admin server (the one with its metrics): its RPC has no such call."""

from __future__ import annotations

from http.client import HTTPConnection, HTTPException

from asynccache.errors import Unavailable
from asynccache_backends.mooncake.settings import Place

WITHIN = 10.0
PATH = "/get_all_keys"


def object_names(admin: Place) -> list[str]:
    """One blocking request.

    Raises:
        Unavailable: it could not be made, or was not answered.
    """
    connection = HTTPConnection(admin.host, admin.port, timeout=WITHIN)
    try:
        connection.request("GET", PATH)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except (OSError, HTTPException) as error:
        raise Unavailable(f"mooncake: the admin server {admin} cannot be asked: {error!r}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unavailable(f"mooncake: the admin server {admin} answered {response.status} to {PATH}")
    return text.split()
