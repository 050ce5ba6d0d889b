"""``asynccache explain URL --tokens ...``: asks a running cache where a prompt's pages are and what ends its match.

``URL`` is the address that a run with ``--serve`` printed, or that of ``start_metrics_server`` in another
program.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Annotated, Any

from asynccache.cli.options import CommandOptions, Json, option
from asynccache.cli.output import answer
from asynccache.errors import ConfigError

TIMEOUT = 30.0
_TOKEN = re.compile("-?[0-9]{1,19}")


class Options(CommandOptions, frozen=True, kw_only=True):
    """The options of ``explain``."""

    url: Annotated[str, option("URL", "where the cache is served, such as http://127.0.0.1:9090", argument=True)]
    tokens: Annotated[str, option("LIST|@FILE", "the prompt's token ids, separated by commas or blanks; or @ and a "
                                                "file that has them")]
    namespace: Annotated[str | None, option("TEXT", "the namespace (default: the one without a name)")] = None
    json: Json = None


def execute(options: Options) -> int:
    """Ask the cache and print its answer; returns the exit status.

    Raises:
        ConfigError: the tokens cannot be read, or the cache cannot be asked.
    """
    from asynccache.runtime.explain import describe

    found = ask(options.url, tokens(options.tokens), options.namespace)
    answer(found, "\n".join(describe(found)), options.json)
    return 0


def tokens(text: str) -> list[int]:
    """The token ids in ``text``: numbers such as ``1,2 3``, or ``@file`` for a file with numbers.

    Raises:
        ConfigError: the file cannot be read, or something is no integer.
    """
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--tokens={text}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    words = text.strip(" \n[]").replace(",", " ").split()
    for word in words:
        if not _TOKEN.fullmatch(word):
            raise ConfigError(f"--tokens: {word[:40]!r} is no token id; give integers separated by commas")
    return [int(word) for word in words]


def ask(url: str, prompt: list[int], namespace: str | None) -> dict[str, Any]:
    """The answer of the cache that is served at ``url``, about the tokens ``prompt`` in ``namespace``.

    Raises:
        ConfigError: nothing answers at ``url``, or the answer is not that of a cache, or the cache refuses the
        question.
    """
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address of a cache: give one such as http://127.0.0.1:9090")
    body = json.dumps({"tokens": prompt, "namespace": namespace}).encode()
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/explain", body, timeout=TIMEOUT) as response:
            found = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            reason = f"{error.code} {error.reason}"
            with suppress(ValueError, KeyError, TypeError):
                reason = str(json.load(error)["error"])
            raise ConfigError(f"{url} refuses: {reason}") from None
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        cause = getattr(error, "reason", error)
        hint = "is a run with --serve PORT, or a program with start_metrics_server, listening there?"
        raise ConfigError(f"{url!r} does not answer: {getattr(cause, 'strerror', None) or cause}; {hint}") from None
    if not isinstance(found, dict) or "spans" not in found:
        raise ConfigError(f"{url} answers, but not as a cache does")
    return found
