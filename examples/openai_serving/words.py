"""Text and tokens: what the server asks of a tokenizer, and the tokenizer of a checkpoint.

Law: the pieces that a ``TextReader`` returns, one after the other, are the text of all its tokens, and no piece
contains a part of a character. A token of a byte-level tokenizer may be a part of a character, and the text of a token
may depend on the token before it. So tokens are decoded together with a few tokens before them, and text is shown when
no later token can change it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

DAMAGED = "\ufffd"
"""The character that a tokenizer shows for bytes that are no UTF-8, or not yet."""

OPEN = 3
"""How many such characters at the end of a text may still become one character: a character has up to four bytes."""

WINDOW = 64
"""How many tokens are decoded together at most before they are divided."""

BEFORE = 6
"""How many tokens of the prompt a completion's first token is decoded with, at least."""

Message = Mapping[str, str]
"""``role`` and ``content``."""


class Unspeakable(ValueError):
    """The model has no tokens for a conversation; the message says why."""


class TextReader(Protocol):
    """Turns tokens into text, one token at a time."""

    def put(self, token: int) -> str:
        """Add ``token``; returns the text that can be shown now and was not shown before."""
        ...

    def rest(self) -> str:
        """The text that was not shown yet, when no more tokens come."""
        ...


class Words(Protocol):
    """A tokenizer. ``vocabulary``: all tokens are below this. ``ends``: tokens that end an answer and are not part of
    it."""

    vocabulary: int
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for a conversation. It ends where the assistant's answer begins.

        Raises:
            Unspeakable: the model has no tokens for this conversation.
        """
        ...

    def reader(self, before: Sequence[int] = ()) -> TextReader:
        """A reader for the tokens that follow ``before``. The text of ``before`` is not shown."""
        ...


def spoken(words: Words, token: int) -> str:
    """One token as a text; ``<number>`` if it is no text by itself."""
    reader = words.reader()
    text = reader.put(token) + reader.rest()
    return text if text and DAMAGED not in text else f"<{token}>"


class CheckpointWords:
    """The tokenizer that comes with a model's weights, with its chat template."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self.ends = ends
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, with the special tokens that the tokenizer adds, such as one for the beginning."""
        return [int(token) for token in self._tokenizer(text, truncation=False)["input_ids"]]

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        if not self._tokenizer.chat_template:
            raise Unspeakable("this checkpoint has no chat template; /v1/completions takes a prompt")
        try:
            made = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:  # a template refuses by raising
            raise Unspeakable(f"the model's chat template refuses it: {error}") from None
        return [int(token) for token in made]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``, without special tokens, and with all blanks as they are."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def reader(self, before: Sequence[int] = ()) -> Incremental:
        return Incremental(self, before)


class Incremental:
    """A reader for any tokenizer that can decode. It keeps a window of the last tokens. The first ``_known`` tokens of
    the window were shown already; they are kept so that the others are decoded with the tokens before them."""

    def __init__(self, words: CheckpointWords, before: Sequence[int]) -> None:
        self._decode = words.decode
        self._window, text = self._begun(before)
        self._known = len(self._window)
        self._shown = len(text)

    def _begun(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last few tokens of ``before`` and their text, which does not end with a damaged character. No tokens if
        ``before`` ends within a character. Some tokenizers show all bytes before a damaged one as damaged, so several
        numbers of tokens are tried until one begins at the beginning of a character."""
        for count in range(BEFORE, BEFORE + OPEN + 1):
            window = list(before[-count:])
            text = self._decode(window) if window else ""
            if not text.endswith(DAMAGED):
                return window, text
        return [], ""

    def put(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        end = _fixed(text, len(self._window) - self._known)
        fresh = text[self._shown : end]
        if fresh and end == len(text):
            self._forget(self._known)
            self._known = len(self._window)
            self._shown = len(self._decode(self._window))
        else:
            self._shown = max(self._shown, end)
            if len(self._window) > WINDOW:
                self._divide(text)
        return fresh

    def rest(self) -> str:
        return self._decode(self._window)[self._shown :] if self._window else ""

    def _forget(self, count: int) -> None:
        del self._window[:count]

    def _divide(self, text: str) -> None:
        """Drop tokens of the window that were shown, up to a place where it can be divided. There, the text of the two
        parts is the text of the whole."""
        for at in range(len(self._window) - OPEN, 0, -1):
            first = self._decode(self._window[:at])
            if len(first) <= self._shown and first + self._decode(self._window[at:]) == text:
                self._forget(at)
                self._known = 0
                self._shown -= len(first)
                return


def _fixed(text: str, fresh: int) -> int:
    """How many characters of ``text`` no later token can change: all but damaged ones at its end, which may become one
    character. ``fresh``: how many tokens were not shown yet. With more than ``OPEN`` + 1 of them only the last ``OPEN``
    characters can change; with fewer every damaged one at the end can, because a tokenizer may show the bytes before an
    incomplete character as damaged as well."""
    most = len(text) if fresh <= OPEN + 1 else OPEN
    end = len(text)
    while end > max(0, len(text) - most) and text[end - 1] == DAMAGED:
        end -= 1
    return end
