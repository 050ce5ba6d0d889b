"""A tokenizer for models that have none. Each byte is a token; two more tokens mark the beginning and end of a message.

Law: text and tokens can be turned into each other without loss. A byte that is no UTF-8 becomes a character of the
private use area (0x80 to 0xFF: U+F780 to U+F7FF), and that character becomes the byte again. So an answer that comes
back as part of a conversation has the same tokens as before, and the cache has their KV.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from openai_serving.words import Message

BEGIN, END = 256, 257
VOCABULARY = 258

_SHOWN = {0xDC00 + byte: 0xF700 + byte for byte in range(0x80, 0x100)}
"""The characters of ``surrogateescape``, which cannot be written as JSON, and those that are shown for them."""
_HIDDEN = {shown: hidden for hidden, shown in _SHOWN.items()}


def encode(text: str) -> list[int]:
    """The tokens of a text.

    Raises:
        UnicodeEncodeError: the text has half of a surrogate pair.
    """
    return list(text.translate(_HIDDEN).encode("utf-8", "surrogateescape"))


def conversation(messages: Iterable[tuple[str, str]]) -> list[int]:
    """The prompt for a conversation of (role, content). It ends where the assistant's answer begins."""
    tokens: list[int] = []
    for role, content in messages:
        tokens += [BEGIN, *encode(f"{role}\n{content}"), END]
    return [*tokens, BEGIN, *encode("assistant\n")]


class ByteReader:
    """Turns tokens into text, one token at a time. A character is returned with its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def put(self, token: int) -> str:
        """The text that ``token`` completes; empty for the tokens that mark a message's beginning or end."""
        return self._decoder.decode(bytes([token])).translate(_SHOWN) if token < BEGIN else ""

    def rest(self) -> str:
        """The text of bytes that are left when no more tokens come."""
        return self._decoder.decode(b"", final=True).translate(_SHOWN)


class ByteWords:
    """This tokenizer as a ``Words``, which the server uses."""

    vocabulary = VOCABULARY
    ends = frozenset((BEGIN, END))

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        return conversation((message["role"], message["content"]) for message in messages)

    def reader(self, before: Sequence[int] = ()) -> ByteReader:
        return ByteReader()


class StopStrings:
    """Ends a text before the first of the stop strings ``stops``. Text that may be the beginning of a stop string is
    held back. ``hit``: whether a stop string has come."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def put(self, text: str) -> str:
        """Add ``text``; returns the text that can be shown now. After a stop string that is always empty."""
        if self.hit:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        self.hit = bool(found)
        cut = min(found) if found else len(self._held) - self._open()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """The text that was held back, if no stop string has come."""
        return "" if self.hit else self._held

    def _open(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
