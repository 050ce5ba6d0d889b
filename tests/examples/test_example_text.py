"""Text in the examples."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_serving import words
from openai_serving.text import BEGIN, END, ByteReader, StopStrings, conversation, encode
from openai_serving.words import CheckpointWords, Unspeakable

from tests.examples.checkpoints import byte_fallback, byte_level

# The tokenizer of the example server: nothing is lost, nothing shown too early.


def decode(tokens: list[int]) -> str:
    reader = ByteReader()
    return "".join(map(reader.put, tokens)) + reader.rest()


@given(st.binary())
def test_any_bytes_survive_as_text(data: bytes) -> None:
    assert encode(decode(list(data))) == list(data)


@given(st.text(st.characters(exclude_categories=["Cs", "Co"])))
def test_any_text_survives_as_tokens(text: str) -> None:
    assert decode(encode(text)) == text
    assert encode(text) == list(text.encode())


def test_a_character_is_shown_when_its_last_byte_is_there() -> None:
    reader = ByteReader()
    assert [reader.put(token) for token in "é".encode()] == ["", "é"]


def test_bytes_that_are_no_text_are_shown_in_the_private_use_area() -> None:
    assert decode([0x41, 0xFF, 0x42]) == "A\uf7ffB"
    assert decode([0xE2, 0x82]) == "\uf7e2\uf782"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        encode("\ud800")


def test_an_answer_that_comes_back_is_the_tokens_that_it_was() -> None:
    first = conversation([("user", "hi")])
    answer = [0x41, 0xFF, 0xC3, 0xA9]
    again = conversation([("user", "hi"), ("assistant", decode(answer)), ("user", "more")])
    assert again[: len(first) + len(answer)] == first + answer
    assert again[len(first) + len(answer)] == END
    assert first[0] == BEGIN


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_a_stop_string_ends_the_text_however_it_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    stopped = StopStrings(stops)
    shown, rest = "", text
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        shown += stopped.put(rest[:cut])
        assert not any(stop in shown for stop in stops)
        assert text.startswith(shown)
        rest = rest[cut:]
        if stopped.hit:
            break
    shown += stopped.rest()
    seen = text[: len(text) - len(rest)]
    ends = [at for at in map(seen.find, stops) if at >= 0]
    assert stopped.hit == bool(ends)
    assert shown == (seen[: min(ends)] if ends else text)


def test_what_cannot_be_the_start_of_a_stop_string_is_shown_at_once() -> None:
    stopped = StopStrings(["STOP"])
    assert [stopped.put(text) for text in ("aS", "T", "x", "STO", "P!")] == ["a", "", "STx", "", ""]
    assert stopped.hit
    assert stopped.rest() == ""
    assert stopped.put("more") == ""


# Tokens of a checkpoint's tokenizer into text, piece by piece: what ``tokenizer.decode`` makes of all of them, and
# never a part of a character.


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
