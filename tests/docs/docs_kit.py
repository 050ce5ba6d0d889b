"""The code blocks of README and the documentation, as the tests need them.

A block that cannot be run where the tests run has ``<!-- not run: the reason -->`` on the line before it. A ``text``
block that follows a block of Python is that block's output. A block with a title is a file of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^ *(?:<!-- not run: (?P<reason>[^>]+) -->\n+ *)?```(?P<language>[\w-]*)(?: title=\"(?P<title>[^\"]+)\")? *\n"
    r"(?P<code>.*?)^ *```$(?=(?:\n+```text\n(?P<printed>.*?)^```$)?)", re.MULTILINE | re.DOTALL,
)  # fmt: skip


class Block(NamedTuple):
    """``place``: page and line. ``reason``: why it is not run. ``printed``: None where the page shows no output."""

    place: str
    language: str
    title: str | None
    code: str
    reason: str | None
    printed: str | None

    @property
    def page(self) -> str:
        return self.place.partition(":")[0]


def blocks(page: Path) -> Iterator[Block]:
    """All code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(f"{page.relative_to(ROOT)}:{line}", found["language"], found["title"], found["code"],
                    found["reason"], found["printed"])  # fmt: skip


def all_blocks(*languages: str) -> list[Block]:
    """The code blocks of all pages, those in ``languages`` only if any are given."""
    return [block for page in PAGES for block in blocks(page) if not languages or block.language in languages]


def files(page: str) -> dict[str, str]:
    """The files that blocks with a title make: those of ``page`` before those of others."""
    titled = [block for block in all_blocks("toml", "json", "yaml", "python") if block.title]
    return {block.title: block.code for block in sorted(titled, key=lambda block: block.page == page) if block.title}


class Shell(NamedTuple):
    """A block of commands: the script, and what the page shows of its output (a line ``...`` stands for any lines)."""

    script: str
    shown: tuple[str, ...]


def shell(block: Block) -> Shell:
    """``console``: commands follow ``$``, and what is printed follows them. ``sh``: all of it is commands."""
    if block.language != "console":
        return Shell(block.code, ())
    script, shown, goes_on = list[str](), list[str](), False
    for line in block.code.splitlines():
        if line.startswith("$ ") or goes_on:
            script.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
        elif line:
            shown.append(line)
    return Shell("\n".join(script) + "\n", tuple(shown))
