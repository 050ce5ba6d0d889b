"""On which line of a TOML text each table and key stands: the parser of the standard library does not say.

The text is known to be good TOML, so this only has to skip values: strings of four kinds, comments, brackets.
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


def places(text: str) -> dict[Path, int]:
    """Line numbers from 1 on, by path. What stands in an inline table or an array is not listed by itself."""
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
    """The line of ``path``, or of the nearest table or value around it."""
    return next((found[path[:n]] for n in range(len(path), 0, -1) if path[:n] in found), None)


def _statements(text: str) -> Iterator[tuple[int, int]]:
    """Line and offset of every key and header."""
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
