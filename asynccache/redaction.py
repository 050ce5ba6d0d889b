"""Hiding passwords and other secrets in texts that are shown. Pure functions; everything that prints settings uses
them.

In a store's URL the part before an ``@`` is hidden, and the values of options whose names say that they are secrets.
Other settings are hidden if their names say so.
"""

from __future__ import annotations

import re

HIDDEN = "***"

_SECRET = re.compile(
    r"passw|passphrase|secret|(?<!per_)token$|key$|key_id|credential|signature|(^|_)(auth|sas|pwd|pass)$", re.IGNORECASE
)
_IN_QUERY = re.compile(r"([?&])([^=&\s]*)=([^&\s]*)")


def is_secret(name: str) -> bool:
    """Return True if a setting of this name is a secret. The name alone decides."""
    return _SECRET.search(name) is not None


def shown(name: str, value: object) -> object:
    """Return the value of a setting, or of a table or list of settings, with its secrets replaced by ``HIDDEN``."""
    if isinstance(value, dict):
        return {key: shown(str(key), one) for key, one in value.items()}
    if type(value) is tuple:
        return tuple(shown(name, one) for one in value)
    if isinstance(value, list):
        return [shown(name, one) for one in value]
    if not isinstance(value, str):
        return value
    if is_secret(name):
        return HIDDEN
    return redacted(value) if ":" in value else value


def redacted(text: str) -> str:
    """Return a store's URL, or several with spaces between them, with the secrets replaced by ``HIDDEN``. Any text may
    be passed in."""
    return re.sub(r"\S+", lambda match: _redacted(match[0]), text)


def _redacted(url: str) -> str:
    location, mark, query = url.partition("?")
    scheme, colon, path = location.partition(":")
    slashes = path[:2] if path.startswith("//") else ""
    path = path[len(slashes) :]
    _, at, host = path.rpartition("@")  # the host begins behind the last "@", since a password may have one in it
    if at and not path.startswith("/"):  # an absolute path of a file has no user in it
        path = f"{HIDDEN}@{host}"
    return scheme + colon + slashes + path + _IN_QUERY.sub(_option, mark + query)


def _option(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={HIDDEN if is_secret(name) else redacted(value) if '@' in value else value}"
