"""``asynccache stress`` and ``asynccache replay``: requests are served by a cache, and every page is verified."""

from __future__ import annotations

from asynccache.cli.options import RunSettings

Options = RunSettings


def execute(settings: RunSettings) -> int:
    """Run, print the summary, write the report; returns the exit status. Raises as ``session.execute``."""
    from asynccache.cli import session  # imports torch: --help and wrong input need not wait for that

    return session.execute(settings)
