"""Counts lines of code. `python .ci/code_lines.py` counts those of the workers of several ranks, which docs/design.md
cites; `python .ci/code_lines.py FILES` counts those of other files.

Counted are lines that hold code: no blank lines, no comments, and no string that stands alone (docstrings, and texts
below a constant).
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

WORKER = (
    "folds", "group", "link", "messages", "rank_server", "ranks", "watched_keys", "work",
)  # fmt: skip
LINKS = [Path(f"asynccache/worker/{name}.py") for name in WORKER]
BESIDE = [
    Path("asynccache/cli/rank.py"), Path("asynccache/cli/ranks.py"), Path("benchmarks/ranks.py"),
    Path("tests/simulated/links.py"), Path("scheduler_shim/asynccache_shim/shards.py"),
    Path("scheduler_shim/asynccache_shim/payload.py"),
]  # fmt: skip
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """How many lines of ``path`` hold code."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def tell(title: str, paths: list[Path]) -> int:
    """Print how many lines of code each of ``paths`` has, and their sum. Returns the sum."""
    counts = [code_lines(path) for path in paths]
    for path, count in zip(paths, counts, strict=True):
        sys.stdout.write(f"{count:6,}  {path}\n")
    sys.stdout.write(f"{sum(counts):6,}  {title}\n\n")
    return sum(counts)


if __name__ == "__main__":
    if sys.argv[1:]:
        tell("in all", [Path(name) for name in sys.argv[1:]])
    else:
        links = tell("both ends of a link, messages, folds and what serves on a rank (goal 1,200)", LINKS)
        beside = tell("command, bench, simulated links and shim beside them", BESIDE)
        sys.stdout.write(f"{links + beside:6,}  in all (goal 2,600)\n")
