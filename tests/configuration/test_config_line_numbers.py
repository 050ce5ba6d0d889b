"""Lines of keys: whatever stands in a value never counts as a key, however it is quoted."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from asynccache.configuration.line_numbers import line_numbers, line_of
from hypothesis import given, settings
from hypothesis import strategies as st

TEXT = '''\
# key = 1
a = """
b = 2
[c]
"""
"d.e" = [ # [f]
  "]", ']',
  {g = 1},
]
h.i = 1
[[j]]
k = { l = "}" }
[ j . m ]
n = \'\'\'
o = "\'\'\'
p = """q""""
'''


def test_every_key_has_its_line() -> None:
    tomllib.loads(TEXT.replace("[ j . m ]", "[j2.m]"))
    found = line_numbers(TEXT)
    assert found == {
        ("a",): 2, ("d.e",): 6, ("h",): 10, ("h", "i"): 10, ("j",): 11, ("j", "k"): 12, ("j", "m"): 13,
        ("j", "m", "n"): 14, ("j", "m", "p"): 16,
    }


def test_what_has_no_line_has_that_of_what_is_around_it() -> None:
    found = line_numbers(TEXT)
    assert line_of(("j", "k", "l"), found) == 12
    assert line_of(("z",), found) is None


KEYS = st.text("ab-_", min_size=1, max_size=3)
STRINGS = st.text("a\"'\\#[]{}=\n ", max_size=6)
VALUES = st.one_of(st.integers(), st.booleans(), STRINGS, st.lists(STRINGS, max_size=3))


def written(value: object) -> str:
    if isinstance(value, list):
        return "[  # [\n" + "".join(f"{written(one)},  # ]\n" for one in value) + "]"
    if isinstance(value, str):
        quoted = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"""\n{quoted}"""' if "\n" in value else f'"{quoted}"'
    return str(value).lower()


def lines(tables: dict[str, dict[str, Any]]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, content in tables.items():
        yield (name,), f"[{name}]"
        for key, value in content.items():
            yield (name, key), f"{key} = {written(value)}"


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(KEYS, st.dictionaries(KEYS, VALUES, max_size=3), max_size=3))
def test_lines_of_made_up_files(tables: dict[str, dict[str, Any]]) -> None:
    text, expected = "", {}
    for path, line in lines(tables):
        expected[path] = text.count("\n") + 1
        text += line + "\n"
    assert tomllib.loads(text) == tables
    assert line_numbers(text) == expected
