"""Tokens of a checkpoint's tokenizer into text, piece by piece: what ``tokenizer.decode`` makes of all of them, and
never a part of a character."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_serving import words
from openai_serving.words import CheckpointWords, Unspeakable

from tests.examples.checkpoints import byte_fallback, byte_level

LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@cache
def kinds() -> dict[str, Any]:
    return {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


def checkpoint(kind: str) -> CheckpointWords:
    tokenizer = kinds()[kind]
    return CheckpointWords(tokenizer, len(tokenizer), frozenset((1,)))


def pieces(known: CheckpointWords, tokens: list[int], before: list[int] | None = None) -> list[str]:
    reader = known.reader(before or [])
    return [*map(reader.put, tokens), reader.rest()]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(text=LETTERS)
def test_a_text_comes_out_as_it_is_decoded(kind: str, text: str) -> None:
    known = checkpoint(kind)
    tokens = known.encode(text)
    shown = pieces(known, tokens)
    assert "".join(shown) == kinds()[kind].decode(tokens, skip_special_tokens=True)
    if words.DAMAGED not in text:
        assert not any(words.DAMAGED in piece for piece in shown), "a part of a character was shown"


@given(st.lists(st.one_of(st.integers(0, 419), st.integers(3, 258)), max_size=120))
def test_any_tokens_come_out_as_they_are_decoded(tokens: list[int]) -> None:
    """Bytes that are no characters, too."""
    assert "".join(pieces(checkpoint("byte_level"), tokens)) == kinds()["byte_level"].decode(
        tokens, skip_special_tokens=True
    )


@given(LETTERS.filter(bool), LETTERS)
def test_a_completion_goes_on_where_its_prompt_ends(prompt: str, text: str) -> None:
    """A tokenizer that drops the blank before a text's first word does not drop it in the middle."""
    known = checkpoint("byte_fallback")
    before, tokens = known.encode(prompt), known.encode(text)[1:]
    whole = kinds()["byte_fallback"].decode(before + tokens, skip_special_tokens=True)
    shown = "".join(pieces(known, tokens, before))
    if words.DAMAGED not in prompt + text:
        assert kinds()["byte_fallback"].decode(before, skip_special_tokens=True) + shown == whole


def test_a_character_is_shown_with_its_last_token() -> None:
    known = checkpoint("byte_level")
    tokens = kinds()["byte_level"].convert_tokens_to_ids(list("ðŁ¦"))    # three bytes of four
    reader = known.reader()
    assert [reader.put(token) for token in tokens] == [""] * len(tokens)
    last = known.encode("🦊")
    assert "".join(pieces(known, last)) == "🦊"


def test_noise_without_an_end_is_shown_and_costs_no_more_and_more() -> None:
    known = checkpoint("byte_level")
    (broken,) = kinds()["byte_level"].convert_tokens_to_ids(["ÿ"])
    reader = known.reader()
    shown = "".join(reader.put(broken) for _ in range(1000))
    assert len(shown) > 990
    assert len(reader._window) <= words.WINDOW + 1
    assert shown + reader.rest() == words.DAMAGED * 1000


def test_a_conversation_is_what_the_chat_template_makes_of_it() -> None:
    known = checkpoint("byte_level")
    made = known.conversation([{"role": "user", "content": "Hi"}])
    assert kinds()["byte_level"].decode(made) == "<|begin|>user\nHi<|end|>\n<|begin|>assistant\n"
    with pytest.raises(Unspeakable, match="there are no developers here"):
        known.conversation([{"role": "developer", "content": "Hi"}])


def test_a_checkpoint_without_a_chat_template_says_so() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = None
    with pytest.raises(Unspeakable, match="no chat template; /v1/completions takes a prompt"):
        CheckpointWords(tokenizer, 420, frozenset()).conversation([{"role": "user", "content": "Hi"}])
