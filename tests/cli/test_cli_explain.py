"""``--serve`` and ``asynccache explain``: a run can be asked about prompts; where it cannot, there is one sentence."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asynccache.cli.explain import tokens
from asynccache.cli.main import main
from asynccache.errors import ConfigError
from tests import warm


@contextmanager
def served(*options: str) -> Iterator[str]:
    """A stress run, and where it is served."""
    command = [sys.executable, "-m", "asynccache", "stress", "--serve", "0", "--quiet", "--duration=30", *options]
    process = warm.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = re.match(r"serving (http://127\.0\.0\.1:\d+)/metrics", process.stderr.readline())
        assert said is not None
        yield said[1]
        process.send_signal(2)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.communicate()


def test_a_run_can_be_looked_into(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with served() as url:
        for page, word in (("/metrics", "asynccache_requests_total"), ("/healthz", "ok"), ("/statistics", '"lookups"')):
            with urllib.request.urlopen(url + page, timeout=20) as answer:
                assert word in answer.read().decode()
        assert main(["explain", url, "--tokens", ",".join(["7"] * 40)]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("40 tokens, 32 of them in whole pages\n")
        assert "match: 0 on the device" in printed
        assert "never in memory" in printed
        file = tmp_path / "tokens"
        file.write_text("[1, 2,\n3]")
        assert main(["explain", url.removeprefix("http://"), "--tokens", f"@{file}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tokens"] == 3
        assert main(["explain", url, "--tokens", "1,-2"]) == 2
        assert "refuses: tokens[1]=-2" in capsys.readouterr().err


def test_tokens_are_read_in_any_usual_form() -> None:
    assert tokens("1,2, 3 4\n") == [1, 2, 3, 4]
    assert tokens("[5]") == [5]
    with pytest.raises(ConfigError, match=r"'1\.5' is no token id"):
        tokens("1.5")
