"""What only its owner may know, and how a text is shown without it. Pure; everything that prints settings uses it.

Hidden are, in a store's URL, all that stands before an ``@`` and the values of options whose names say that they are
secrets; of other settings those whose names say so.
"""

from __future__ import annotations

import re

HIDDEN = "***"

_SECRET = re.compile(
    r"passw|passphrase|secret|(?<!per_)token$|key$|key_id|credential|signature|(^|_)(auth|sas|pwd|pass)$", re.IGNORECASE
)
_IN_QUERY = re.compile(r"([?&])([^=&\s]*)=([^&\s]*)")


def is_secret(name: str) -> bool:
    """Whether a setting of this name is one that only its owner may know."""
    return _SECRET.search(name) is not None


def shown(name: str, value: object) -> object:
    """The value of a setting, or of a table of them, as others may see it."""
    if isinstance(value, dict):
        return {key: shown(str(key), one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(shown(name, one) for one in value)
    if not isinstance(value, str):
        return value
    if is_secret(name):
        return HIDDEN
    return redacted(value) if ":" in value else value


def redacted(text: str) -> str:
    """A store's URL, or several with spaces between them, as others may see it. Any text will do."""
    return re.sub(r"\S+", lambda match: _redacted(match[0]), text)


def _redacted(url: str) -> str:
    location, mark, query = url.partition("?")
    scheme, colon, path = location.partition(":")
    slashes = path[:2] if path.startswith("//") else ""
    shown = scheme + colon + slashes + _host_part(path[len(slashes) :])
    return shown + _IN_QUERY.sub(_option, mark + query)


def _host_part(path: str) -> str:
    """Behind the last ``@`` is the host; a password may have anything in it. An absolute path has no user."""
    _, at, host = path.rpartition("@")
    if not at or path.startswith("/"):
        return path
    return f"{HIDDEN}@{host}"


def _option(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={HIDDEN if is_secret(name) else redacted(value) if '@' in value else value}"
