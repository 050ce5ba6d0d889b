"""A tokenizer for models that have none: a token is a byte; two more mark where a message begins and where it ends.

Law: text and tokens go to and fro without loss. A byte that is no UTF-8 becomes a character of the private use area
(0x80 to 0xFF: U+F780 to U+F7FF) and is made from it again, so an answer that comes back as part of a conversation is
the tokens that it was, and the cache has them.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from openai_serving.words import Message

BEGIN, END = 256, 257
VOCABULARY = 258

_SHOWN = {0xDC00 + byte: 0xF700 + byte for byte in range(0x80, 0x100)}  # surrogateescape's characters are no JSON
_HIDDEN = {shown: hidden for hidden, shown in _SHOWN.items()}


def encode(text: str) -> list[int]:
    """The tokens of a text.

    Raises:
        UnicodeEncodeError: it has half of a surrogate pair.
    """
    return list(text.translate(_HIDDEN).encode("utf-8", "surrogateescape"))


def conversation(messages: Iterable[tuple[str, str]]) -> list[int]:
    """The prompt that a conversation (role, content) makes: it ends where the assistant is to go on."""
    tokens: list[int] = []
    for role, content in messages:
        tokens += [BEGIN, *encode(f"{role}\n{content}"), END]
    return [*tokens, BEGIN, *encode("assistant\n")]


class Reader:
    """Tokens into text, one at a time. A character is there when its last byte is."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def put(self, token: int) -> str:
        """What ``token`` adds to the text. Marks add nothing."""
        return self._decoder.decode(bytes([token])).translate(_SHOWN) if token < BEGIN else ""

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._decoder.decode(b"", final=True).translate(_SHOWN)


class Bytes:
    """This tokenizer, as the server asks it."""

    vocabulary = VOCABULARY
    ends = frozenset((BEGIN, END))

    def encode(self, text: str) -> list[int]:
        return encode(text)

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        return conversation((message["role"], message["content"]) for message in messages)

    def reader(self, before: Sequence[int] = ()) -> Reader:
        return Reader()


class StopStrings:
    """Ends a text before the first of ``stops``, and shows nothing that may yet turn out to be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.hit = False

    def put(self, text: str) -> str:
        """What can be shown now. Nothing more, once a stop string was there."""
        if self.hit:
            return ""
        self._held += text
        found = [at for at in map(self._held.find, self._stops) if at >= 0]
        self.hit = bool(found)
        cut = min(found) if found else len(self._held) - self._open()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """What was held back, if no stop string came."""
        return "" if self.hit else self._held

    def _open(self) -> int:
        """How many of the last characters a stop string may begin with."""
        longest = max(map(len, self._stops), default=1) - 1
        lengths = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)
