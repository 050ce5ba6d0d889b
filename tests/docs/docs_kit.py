"""The code blocks of README and the documentation, as the tests need them.

A block that cannot be run where the tests run has ``<!-- not run: the reason -->`` on the line before it. A ``text``
block that follows a block of Python is what that prints.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$"
    r"(?=(?:\n+```text\n(?P<printed>.*?)^```$)?)", re.MULTILINE | re.DOTALL,
)  # fmt: skip


class Block(NamedTuple):
    """``place``: page and line. ``reason``: why it is not run. ``printed``: None where the page does not say."""

    place: str
    language: str
    code: str
    reason: str | None
    printed: str | None


def blocks(page: Path) -> Iterator[Block]:
    """All code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found["language"].strip(), found["code"], found["reason"],
                    found["printed"])  # fmt: skip


def all_blocks(*languages: str) -> list[Block]:
    """Those in ``languages``, of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The command lines of a shell block that run our own programs, without prompt, comment and environment."""
    for line in block.code.replace("\\\n", " ").splitlines():
        text = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
        if not re.match(r"(\w+=\S+ )*(asynccache|make|python examples/\S+)( |$)", text):
            continue
        words = shlex.split(text, comments=True)
        while "=" in words[0]:
            words.pop(0)
        yield words
