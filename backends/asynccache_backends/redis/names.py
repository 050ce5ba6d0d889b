"""What a page is called on the server: the prefix and the 32 bytes of its key. Nothing else ever becomes part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asynccache.storage import KEY_BYTES, PageKey

_SPECIAL = b"*?[]\\^-"  # in the patterns of SCAN


class Names:
    """All names of a store are of one length and begin alike; so no store's are another's, whatever the prefixes."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._length = len(prefix) + KEY_BYTES

    def of(self, keys: Sequence[PageKey]) -> list[bytes]:
        """The names of pages."""
        prefix = self._prefix
        return [prefix + key.key for key in keys]

    def key(self, name: bytes) -> bytes:
        """The 32 bytes in a name."""
        return name[len(self._prefix) :]

    def ours(self, names: Iterable[bytes]) -> list[bytes]:
        """Those that are names of this store."""
        return [name for name in names if len(name) == self._length and name.startswith(self._prefix)]

    def commands(self, verb: bytes, names: Sequence[bytes]) -> list[bytes]:
        """``verb name`` for each."""
        head = b"*2\r\n$%d\r\n%b\r\n$%d\r\n" % (len(verb), verb, self._length)
        return [b"%b%b\r\n" % (head, name) for name in names]

    def pattern(self) -> bytes:
        """What SCAN is to look for; it may find more, never less."""
        return b"".join(b"\\%c" % byte if byte in _SPECIAL else b"%c" % byte for byte in self._prefix) + b"*"
