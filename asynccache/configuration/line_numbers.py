"""The line numbers of tables and keys in a TOML text, for error messages. ``tomllib`` does not give them.

The text has been parsed before and is correct TOML. So this module only has to find where a value ends: it knows the
four kinds of strings, comments and brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Path = tuple[str, ...]

_KEY = re.compile(r"""[ \t]*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([\w-]+))[ \t]*(\.?)""")
_HEADER = re.compile(r"[ \t]*\[\[?")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")' r"|'''.*?'{3,5}(?!')" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'"
    r"|\#[^\n]*|[\[\]{}\n]|[^\"'\#\[\]{}\n]+", re.DOTALL,
)


def line_numbers(text: str) -> dict[Path, int]:
    """Return the line of each table and key by its path, counted from 1. Keys inside an inline table or an array have
    no entry."""
    found: dict[Path, int] = {}
    table: Path = ()
    for line, at in _statements(text):
        header = _HEADER.match(text, at)
        path = _key(text, at if header is None else header.end())
        whole = path if header is not None else table + path
        for depth in range(1, len(whole) + 1):
            found.setdefault(whole[:depth], line)
        if header is not None:
            table = path
    return found


def line_of(path: Path, found: dict[Path, int]) -> int | None:
    """Return the line of ``path``, counted from 1. If ``path`` has no entry, return the line of the nearest table or
    value around it; None if there is none."""
    return next((found[path[:n]] for n in range(len(path), 0, -1) if path[:n] in found), None)


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """Yield the line and the offset at which each key of a value and each table's header begins."""
    at, line, depth, fresh = 0, 1, 0, True
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return
        word = token[0]
        if fresh and word.strip() and not word.startswith("#"):
            yield line, at
            fresh = False
        depth += (word in ("[", "{")) - (word in ("]", "}"))
        if word == "\n" and depth == 0:
            fresh = True
        line += word.count("\n")
        at = token.end()


def _key(text: str, at: int) -> Path:
    parts: list[str] = []
    while (part := _KEY.match(text, at)) is not None:
        parts.append(next(word for word in part.groups()[:3] if word is not None))
        at = part.end()
        if not part[4]:
            break
    return tuple(parts)
