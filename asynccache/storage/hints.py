"""The hints that come with an engine's requests, as what stores can do about them.

vLLM and SGLang carry an envelope of actions (``kv_hints``) from their callers down, and look into none of them: which
actions there are is for whoever sends and whoever obeys. Ours are in ``VERBS``, under names that others propose and
under our own. Whatever comes is counted: an action of another name is ``unknown``, one that is not as it should be is
``malformed``, and neither changes anything. No value in an envelope is trusted, whatever its annotation says.

    {"action_type": "kv.prefetch", "payload": {"block_hashes": ["9f86d0…", …]}}   hexadecimal; may be left out
    {"action_type": "kv.retain", "payload": {"duration": 600, "end": 4096}}       seconds; tokens, may be left out
    {"action_type": "kv.end", "payload": {"start": 2048}}                         tokens; may be left out
    {"action_type": "kv.skip_store", "payload": {}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

VERBS: Mapping[str, str] = {
    "kv.prefetch": "prefetch",
    "kv.retain": "keep", "kv.pin": "keep", "kv.keep": "keep",
    "kv.end": "ended", "kv.deref": "ended", "kv.release": "ended", "kv.evict": "ended",
    "kv.skip_store": "skip_store",
}  # fmt: skip
"""Our verb by the type of an action."""

UNKNOWN, MALFORMED = "unknown", "malformed"
MOST_ACTIONS = 64
MOST_HASHES = 1 << 16
MOST_SECONDS = 30 * 86400.0
MOST_TOKENS = 1 << 40
MAJORS = ("0", "1")


@dataclass(slots=True)
class RequestHints:
    """The sum of one request's hints.

    prefetch: its chunks will be wanted soon. block_hashes: those that it names, by vLLM's hashes.
    keep: for how many seconds its chunks are to be kept; 0: no longer than others. keep_end: those up to this token;
    None: all.
    ended: its conversation is over. ended_start: what comes before this token others have, too; None: not said.
    skip_store: what it computes is not to be stored.
    """

    prefetch: bool = False
    block_hashes: tuple[bytes, ...] = ()
    keep: float = 0.0
    keep_end: int | None = None
    ended: bool = False
    ended_start: int | None = None
    skip_store: bool = False


def read_hints(envelope: object) -> tuple[RequestHints, Counter[str]]:
    """Return what ``envelope`` (a dictionary, or the engine's own object) asks for, and how many of its actions there
    were of each verb, ``unknown`` and ``malformed``. An envelope that is none counts as one malformed action."""
    hints, counts = RequestHints(), Counter[str]()
    actions = _field(envelope, "actions")
    if not isinstance(actions, (list, tuple)):
        counts[MALFORMED] += 1
        return hints, counts
    counts[MALFORMED] += max(0, len(actions) - MOST_ACTIONS)
    for action in actions[:MOST_ACTIONS]:
        counts[_take(hints, action)] += 1
    return hints, +counts


def _field(of: object, name: str) -> Any:
    return of.get(name) if isinstance(of, dict) else getattr(of, name, None)


def _take(hints: RequestHints, action: object) -> str:
    kind, version, payload = (_field(action, name) for name in ("action_type", "action_version", "payload"))
    if not isinstance(kind, str) or not isinstance(version, str) or not isinstance(payload, dict):
        return MALFORMED
    verb = VERBS.get(kind)
    if verb is None or version.partition(".")[0] not in MAJORS:
        return UNKNOWN
    try:
        match verb:
            case "prefetch":
                hints.block_hashes += _hashes(payload.get("block_hashes", []), MOST_HASHES - len(hints.block_hashes))
                hints.prefetch = True
            case "keep":
                seconds, end = _kept(payload)
                if seconds:
                    longest = None if end is None or (hints.keep and hints.keep_end is None) else end
                    hints.keep_end = longest if longest is None else max(longest, hints.keep_end or 0)
                    hints.keep = max(seconds, hints.keep)
            case "ended":
                start = _tokens(payload.get("start"))
                hints.ended, hints.ended_start = True, start if start is not None else hints.ended_start
            case _:
                hints.skip_store = True
    except ValueError:
        return MALFORMED
    return verb


def _kept(payload: Mapping[str, Any]) -> tuple[float, int | None]:
    """Return for how many seconds to keep, and up to which token. vLLM's proposal for ``kv.retain`` has ``directives``,
    parts of the text with a ``priority``, 0 for those that need not be kept. A prefix serves only as a whole, so the
    last token and the longest time of all directives count."""
    directives = payload.get("directives")
    if directives is None:
        return _seconds(payload), _tokens(payload.get("end"))
    if not isinstance(directives, list) or len(directives) > MOST_ACTIONS:
        raise ValueError("directives")
    longest, ends = 0.0, list[int | None]()
    for one in directives:
        if not isinstance(one, dict) or type(one.get("priority")) is not int:
            raise ValueError("priority")
        if one["priority"] > 0:
            longest = max(longest, _seconds(one))
            ends.append(_tokens(one.get("end")))
    known = [end for end in ends if end is not None]
    return longest, max(known) if known and len(known) == len(ends) else None


def _seconds(payload: Mapping[str, Any]) -> float:
    found = [payload[name] for name in ("duration", "ttl_seconds", "ttl") if payload.get(name) is not None]
    if len(found) != 1 or type(found[0]) not in (int, float):
        raise ValueError("seconds")
    seconds = float(min(found[0], MOST_SECONDS))  # an integer may be too large for a float
    if not isfinite(seconds) or seconds <= 0:
        raise ValueError("seconds")
    return seconds


def _tokens(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MOST_TOKENS:
        raise ValueError("tokens")
    return value


def _hashes(value: object, most: int) -> tuple[bytes, ...]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) and one for one in value):
        raise ValueError("block_hashes")
    return tuple(map(bytes.fromhex, value))
