"""Between text and tokens: what the server asks of a tokenizer, and the tokenizer of a checkpoint.

Law: the pieces that a ``Reader`` gives, one after the other, are the text of all its tokens, and no piece has a part of
a character. A token of a byte-level tokenizer may be a part of a character, and what a token means may depend on the
one before it, so tokens are decoded together with a few before them, and text is shown when no later token can change
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jinja2 import TemplateError

DAMAGED = "\ufffd"
"""What a tokenizer makes of bytes that are no UTF-8, or not yet."""

OPEN = 3
"""Damaged characters at the end of a text that may still become one character: all bytes of one but the last."""

WINDOW = 64
"""Tokens that are decoded together before a place is sought where they can be divided."""

BEFORE = 6
"""Tokens of the prompt that a completion's first token is decoded with."""

Message = Mapping[str, str]
"""``role`` and ``content``."""


class Unspeakable(ValueError):
    """A conversation that the model has no tokens for; says why."""


class Reader(Protocol):
    """Tokens into text, one at a time."""

    def put(self, token: int) -> str:
        """What ``token`` adds to what can be shown."""
        ...

    def rest(self) -> str:
        """What is left when no more tokens come."""
        ...


class Words(Protocol):
    """A tokenizer. ``vocabulary``: tokens are smaller. ``ends``: those that end an answer and are no part of it."""

    vocabulary: int
    ends: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def conversation(self, messages: Sequence[Message]) -> list[int]:
        """The prompt that a conversation makes: it ends where the assistant is to go on.

        Raises:
            Unspeakable: the model has no way to say this.
        """
        ...

    def reader(self, before: Sequence[int] = ()) -> Reader:
        """For the tokens that follow ``before``, whose text is not shown again."""
        ...


class Checkpoint:
    """The tokenizer that lies beside a model's weights, with its chat template."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self.vocabulary = vocabulary
        self.ends = ends
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """With the marks that the tokenizer puts around a text, such as one for its beginning."""
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
        """The text of tokens, as they are: without marks, and nothing tidied up."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def reader(self, before: Sequence[int] = ()) -> Incremental:
        return Incremental(self, before)


class Incremental:
    """A reader for any tokenizer that can only decode. It keeps a window of the last tokens: the first ``_known`` of
    them were shown, and are there so that the others are decoded as they would be after them."""

    def __init__(self, words: Checkpoint, before: Sequence[int]) -> None:
        self._decode = words.decode
        self._window, text = self._begun(before)
        self._known = len(self._window)
        self._shown = len(text)

    def _begun(self, before: Sequence[int]) -> tuple[list[int], str]:
        """The last of the tokens before, from a character's beginning on if they end with one's end, and their text."""
        for count in range(BEFORE, BEFORE + OPEN + 1):
            window = list(before[-count:])
            text = self._decode(window) if window else ""
            if not text.endswith(DAMAGED):
                return window, text
        return [], ""

    def put(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        end = _settled(text, len(self._window) - self._known)
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
        """Forget what was shown of the window, where it can be divided: its parts say what the whole says."""
        for at in range(len(self._window) - OPEN, 0, -1):
            first = self._decode(self._window[:at])
            if len(first) <= self._shown and first + self._decode(self._window[at:]) == text:
                self._forget(at)
                self._known = 0
                self._shown -= len(first)
                return


def _settled(text: str, fresh: int) -> int:
    """How much of ``text`` no later token can change. ``fresh``: tokens that nothing was shown of yet. While there may
    be a character in them that is not whole, a tokenizer may show the bytes before it as damaged, too."""
    most = len(text) if fresh <= OPEN + 1 else OPEN
    end = len(text)
    while end > max(0, len(text) - most) and text[end - 1] == DAMAGED:
        end -= 1
    return end
