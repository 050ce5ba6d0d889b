"""The tokenizer of the example server: nothing is lost, nothing shown too early."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_serving.text import BEGIN, END, ByteReader, StopStrings, conversation, encode


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
