"""Traces: what was asked of a server, request by request. Reads the published formats, and works out what a trace says
by itself, without a cache.

``read_trace`` recognises a format by the fields of the first record, and every record after it must be of the same:

* **Mooncake**: a request on each line. ``timestamp`` (milliseconds), ``input_length`` and ``output_length`` (tokens),
  and ``hash_ids``: one id for each block of 512 tokens of the prompt. Blocks with equal ids are equal if all blocks
  before them are equal too. Blocks of another size: ``block_size`` in the records, as ``kvcache-simulator`` reads it,
  or the option.
* **Qwen-Bailian**: the same with ``chat_id``, ``parent_chat_id`` (-1: it begins a conversation), a ``timestamp`` in
  seconds, and blocks of 16 tokens.
* **AgentX** (Weka's kv-cache-tester and what is published from it): a conversation on each line or in each file of a
  folder. ``block_size``, ``hash_id_scope`` (``local``: ids are those of this conversation; ``global``), and
  ``requests``: each with ``t`` (seconds since the conversation began), ``in``, ``out`` and ``hash_ids``. A request that
  has ``requests`` itself is a subagent. Their times count from the conversation's beginning or, if one of them would
  then be before the subagent, from the subagent's.

The last block may be partial; it may also have no id, and then it is like no other. An AgentX request may have no ids
at all. Fields that are not named here are not looked at.

A file is read line by line, compressed or not (``.gz``), and at most one record at a time is in memory beside the
requests, which take 8 bytes a block. Refused are times beyond the year 2248, prompts of more than 16 million tokens,
outputs of more than one million, and records of more than ``MOST_BYTES``; an error names the file, the line, the field
and the value.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from asynccache import checks
from asynccache.errors import AsyncCacheError, ConfigError

BLOCK_TOKENS = 512
"""Tokens in one block of a trace whose records do not say another number."""
MOST_BLOCK = 1 << 16
MOST_BYTES = 1 << 28
"""The longest line, and the longest file of one conversation."""
CONVERSATIONS = 16
"""Conversations of an AgentX trace that are open at the same time, if nothing else is said."""
_LOCAL_BITS = 40
_MOST_TIME = 1 << 43


class TraceError(AsyncCacheError, ValueError):
    """A trace cannot be read. The message names the file and, for a malformed record, its line, the field and the
    value."""


class TraceRequest(NamedTuple):
    """One request of a trace. ``timestamp``: milliseconds; lengths in tokens. ``blocks``: its ``hash_ids``, which may
    be one less than the prompt has blocks, or none. ``conversation``: equal for the requests of one conversation; None:
    the trace does not say."""

    timestamp: float
    input_length: int
    output_length: int
    blocks: Sequence[int]
    conversation: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a trace, in their order. ``block_size``: tokens of a block. ``form``: the name of its format."""

    requests: Sequence[TraceRequest]
    block_size: int = BLOCK_TOKENS
    form: str = "Mooncake"

    def path(self, request: TraceRequest) -> Sequence[int]:
        """The ids of the full blocks of ``request``."""
        return request.blocks[: request.input_length // self.block_size]


class TraceSurvey(NamedTuple):
    """Figures of a trace, as if a cache that forgets nothing served it one request at a time. Each field has one entry
    for each request.

    shared_blocks: full blocks of its prompt that an earlier prompt has under the same prefix.
    fresh_tokens: tokens of its prompt that no earlier prompt has.
    last: the last request of its conversation. If the trace names no conversations: no later prompt has all full blocks
        of this one, so the conversation seems to end here.
    later_blocks: full blocks of its prompt that a later prompt has as well.
    """

    shared_blocks: tuple[int, ...]
    fresh_tokens: tuple[int, ...]
    last: tuple[bool, ...]
    later_blocks: tuple[int, ...] = ()


Record = tuple[str, Mapping[str, Any]]
"""A JSON object, and where it is: the file and the line."""


def read_trace(
    path: str, limit: int | None = None, *, block_size: int | None = None, conversations: int | None = None
) -> Trace:
    """The first ``limit`` requests of the trace at ``path``. Blocking.

    ``path``: a file, or a folder of ``.json`` and ``.jsonl`` files, which are read in the order of their names.
    ``block_size``: tokens of a block, if the records do not say it. ``conversations``: so many of an AgentX trace are
    open at the same time; the next one begins when one of them has had its last request. None: ``CONVERSATIONS``.

    Raises:
        TraceError: the trace cannot be read, is empty, has a malformed record, or says another size of its blocks.
        ConfigError: ``conversations`` was given, and the trace is of another format.
    """
    records = _records(path)
    first = next(records, None)
    if first is None:
        raise TraceError(f"the trace {path} has no requests")
    where, row = first
    form = next((form for form in _FORMS if form.sign in row), None)
    if form is None:
        raise TraceError(f"{where}: no trace that is known: a record has {', '.join(form.sign for form in _FORMS[:-1])}"
                         f" or {_FORMS[-1].sign}, and this one has {checks.shown(', '.join(map(str, row)) or 'none')}")
    if conversations is not None and form.read is not _agentx:
        raise ConfigError(f"--conversations={conversations}: the requests of {path} have times of their own; it is a "
                          f"{form.name} trace")
    with _read_at(where):
        size = checks.integer("block_size", row.get("block_size", block_size or form.block), 1, MOST_BLOCK)
    if block_size is not None and size != block_size:
        raise TraceError(f"{where}: block_size={size}, and {block_size} was given")
    found: list[TraceRequest] = []
    for request in form.read(chain([first], records), size, conversations or CONVERSATIONS):
        found.append(request)
        if len(found) == limit:
            break
    if not found:
        raise TraceError(f"the trace {path} has no requests")
    return Trace(found, size, form.name)


def _records(path: str) -> Iterator[Record]:
    try:
        if not os.path.isdir(path):
            yield from _file_records(path)
            return
        names = sorted(str(one) for one in Path(path).iterdir() if _plain_suffix(one.name) in (".json", ".jsonl"))
        if not names:
            raise TraceError(f"cannot read the trace {path}: the folder has no .json or .jsonl files")
        for name in names:
            yield from _file_records(name)
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or str(error) or "it ends too soon"
        raise TraceError(f"cannot read the trace {path}: {told}") from None


def _plain_suffix(name: str) -> str:
    return os.path.splitext(name.removesuffix(".gz"))[1]


def _file_records(path: str) -> Iterator[Record]:
    """The records of one file: each on a line, or, in a ``.json`` file whose first line is none, one over all lines."""
    with cast(BinaryIO, gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")) as file:
        number, most = 0, MOST_BYTES + 1
        while line := file.readline(most):
            number += 1
            try:
                record = _record(line, path, number) if line.strip() else None
            except TraceError:
                if number > 1 or _plain_suffix(path) != ".json" or not (rest := file.read(most - len(line))):
                    raise
                record = _record(line + rest, path, number)
            if record is not None:
                yield f"{path}:{number}", record


def _record(line: bytes, path: str, number: int) -> Mapping[str, Any]:
    if len(line) > MOST_BYTES:
        raise TraceError(f"{path}:{number}: a record of more than {MOST_BYTES} bytes")
    try:
        row = json.loads(line.rstrip())
    except UnicodeDecodeError:
        raise TraceError(f"cannot read the trace {path}: it is not UTF-8 text (line {number})") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}:{number + error.lineno - 1}: not a JSON object: {error}") from None
    except (ValueError, RecursionError) as error:  # a number of very many digits
        raise TraceError(f"{path}:{number}: not a JSON object: {error}") from None
    if not isinstance(row, dict):
        raise TraceError(f"{path}:{number}: not a JSON object but {checks.shown(row)}")
    return row


@contextmanager
def _read_at(where: str) -> Iterator[None]:
    """Within it a field that is missing or malformed is a TraceError that says where it is."""
    try:
        yield
    except KeyError as error:
        raise TraceError(f"{where}: the field {error.args[0]!r} is missing") from None
    except ConfigError as error:
        raise TraceError(f"{where}: {error}") from None


def _ids(row: Mapping[str, Any], length: int, size: int, bits: int = 64) -> array[int]:
    """The ``hash_ids`` of a prompt of ``length`` tokens: as many as it has blocks, the last one perhaps without."""
    given = checks.instance("hash_ids", row["hash_ids"], (list, tuple))
    try:
        blocks = array("Q", msgspec.convert(given, list[int]))
    except (msgspec.ValidationError, OverflowError) as error:
        why = (f": {error}" if isinstance(error, msgspec.ValidationError)
               else " must be integers from 0 to 2**64 - 1")
        raise ConfigError(f"hash_ids={checks.shown(given)}{why}") from None
    if bits < 64 and max(blocks, default=0) >= 1 << bits:
        raise ConfigError(f"hash_ids={checks.shown(given)} must be integers from 0 to 2**{bits} - 1")
    if not length // size <= len(blocks) <= -(-length // size):
        raise ConfigError(f"hash_ids has {len(blocks)} blocks, but a prompt of {length} tokens makes "
                          f"{-(-length // size)} of {size} tokens")
    return blocks


def _request(row: Mapping[str, Any], size: int, unit: float) -> TraceRequest:
    """The request in a record of Mooncake's or Qwen-Bailian's, whose times are in ``unit`` milliseconds."""
    length = checks.integer("input_length", row["input_length"], 1, 1 << 24)
    _check_size(row, size)
    return TraceRequest(
        checks.number("timestamp", row["timestamp"], 0, _MOST_TIME / unit) * unit, length,
        checks.integer("output_length", row["output_length"], 0, 1 << 20), _ids(row, length, size),
    )  # fmt: skip


def _mooncake(records: Iterator[Record], size: int, _: int) -> Iterator[TraceRequest]:
    for where, row in records:
        with _read_at(where):
            request = _request(row, size, 1)
        yield request


def _bailian(records: Iterator[Record], size: int, _: int) -> Iterator[TraceRequest]:
    roots: dict[int, int] = {}
    for where, row in records:
        with _read_at(where):
            request = _request(row, size, 1000)
            chat = checks.integer("chat_id", row["chat_id"], 0, 1 << 62)
            parent = checks.integer("parent_chat_id", row.get("parent_chat_id", -1), -1, 1 << 62)
        roots[chat] = chat if parent < 0 else roots.get(parent, parent)
        yield request._replace(conversation=roots[chat])


def _agentx(records: Iterator[Record], size: int, conversations: int) -> Iterator[TraceRequest]:
    """The requests of all conversations by their times, with ``conversations`` of them open at the same time."""
    opened = (_conversation(where, row, size, number) for number, (where, row) in enumerate(records))
    begun = ((one[0].timestamp, number, 0, 0.0, one) for number, one in enumerate(opened) if one)
    waiting = [first for _, first in zip(range(conversations), begun, strict=False)]
    heapify(waiting)
    while waiting:
        at, number, place, start, texts = waiting[0]
        yield texts[place]._replace(timestamp=at)
        if place + 1 < len(texts):
            heapreplace(waiting, (start + texts[place + 1].timestamp, number, place + 1, start, texts))
        elif (following := next(begun, None)) is not None:
            heapreplace(waiting, (at + following[0], following[1], 0, at, following[4]))
        else:
            heappop(waiting)


def _conversation(where: str, row: Mapping[str, Any], size: int, number: int) -> list[TraceRequest]:
    """The requests of one conversation, by their times since it began."""
    with _read_at(where):
        requests, scope = row["requests"], row.get("hash_id_scope", "local")
        _check_size(row, size)
        if scope not in ("local", "global"):
            raise ConfigError(f"hash_id_scope={checks.shown(scope)} must be 'local' or 'global'")
    found: list[TraceRequest] = []
    for place, (at, one) in _calls(where, requests):
        with _read_at(place):
            length = checks.integer("in", one["in"], 1, 1 << 24)
            blocks = array("Q")
            if one.get("hash_ids"):
                blocks = _ids(one, length, size, _LOCAL_BITS if scope == "local" else 64)
            output = checks.integer("out", one["out"], 0, 1 << 20)
        if scope == "local":
            blocks = array("Q", [number << _LOCAL_BITS | block for block in blocks])
        found.append(TraceRequest(at * 1000, length, output, blocks, number))
    found.sort(key=lambda request: request.timestamp)
    return found


def _calls(where: str, requests: Any, *, subagent: bool = False) -> Iterator[tuple[str, tuple[float, dict[str, Any]]]]:
    """Each request with its seconds since the conversation began, and where it is; those of subagents, too."""
    if not isinstance(requests, list):
        raise TraceError(f"{where}: requests={checks.shown(requests)} must be of type list")
    for number, one in enumerate(requests, 1):
        place = f"{where}: request {number}"
        if not isinstance(one, dict):
            raise TraceError(f"{place}: not a JSON object but {checks.shown(one)}")
        with _read_at(place):
            at = checks.number("t", one["t"], 0, _MOST_TIME / 1000)
        if "requests" not in one:
            yield place, (at, one)
            continue
        if subagent:
            raise TraceError(f"{place}: a subagent of a subagent")
        inner = list(_calls(place, one["requests"], subagent=True))
        relative = min((start for _, (start, _) in inner), default=at) < at
        for inside, (start, call) in inner:
            yield inside, (at + start if relative else start, call)


def _check_size(row: Mapping[str, Any], size: int) -> None:
    if (found := checks.integer("block_size", row.get("block_size", size), 1, MOST_BLOCK)) != size:
        raise ConfigError(f"block_size={found}, and the trace began with {size}")


class _Form(NamedTuple):
    """A format. ``sign``: the field by which it is known, unless an earlier one has its own. ``block``: tokens of a
    block. ``read``: its requests, given the records, the tokens of a block, and the conversations at a time."""

    name: str
    sign: str
    block: int
    read: Callable[[Iterator[Record], int, int], Iterator[TraceRequest]]


_FORMS = (
    _Form("AgentX", "requests", 64, _agentx),
    _Form("Qwen-Bailian", "chat_id", 16, _bailian),
    _Form("Mooncake", "hash_ids", BLOCK_TOKENS, _mooncake),
)


def survey(trace: Trace) -> TraceSurvey:
    """Return the blocks and tokens that each prompt shares with earlier and later ones."""
    seen: set[int] = set()
    partial: dict[tuple[int, int], int] = {}
    shared, fresh, paths, ends = [], [], list(paths_of(trace)), dict[int, int]()
    for number, (request, path) in enumerate(zip(trace.requests, paths, strict=True)):
        known, rest = sum(key in seen for key in path), request.input_length - len(path) * trace.block_size
        seen.update(path)
        new = (len(path) - known) * trace.block_size
        if len(request.blocks) > len(path):
            key = (path[-1] if path else -1, request.blocks[len(path)])
            new += max(0, rest - partial.get(key, 0))
            partial[key] = max(rest, partial.get(key, 0))
        else:
            new += rest
        shared.append(known)
        fresh.append(new)
        if request.conversation is not None:
            ends[request.conversation] = number
    seen.clear()
    later = []
    for path in reversed(paths):  # the blocks that are in a later path are a prefix: who has one has all before it
        later.append(sum(block in seen for block in path))
        seen.update(path)
    later.reverse()
    last = tuple([
        not path or blocks < len(path) if request.conversation is None else ends[request.conversation] == number
        for number, (request, path, blocks) in enumerate(zip(trace.requests, paths, later, strict=True))
    ])
    return TraceSurvey(tuple(shared), tuple(fresh), last, tuple(later))


def paths_of(trace: Trace) -> Iterator[list[int]]:
    """The full blocks of each prompt, as keys from 0 on. Equal blocks after equal blocks get one key."""
    known: dict[tuple[int, int], int] = {}
    for request in trace.requests:
        path, parent = [], -1
        for block in trace.path(request):
            parent = known.setdefault((parent, block), len(known))
            path.append(parent)
        yield path


def arrivals(trace: Trace, speed: float) -> list[float]:
    """The arrival of each request, in seconds after the start, at ``speed`` times the trace's speed; 0: all at once.

    Traces have the same timestamp for several requests. Those are spread evenly until the next timestamp.
    """
    import numpy as np  # here, because --help answers without it, and `serve` shares this module's options

    count = len(trace.requests)
    if not speed:
        return [0.0] * count
    stamps = np.maximum.accumulate([request.timestamp for request in trace.requests])
    ticks, first = np.unique(stamps - stamps[0], return_index=True)
    end = ticks[-1] + (ticks[-1] - ticks[-2] if len(ticks) > 1 else 0.0)  # the last tick is as long as the one before
    times: list[float] = np.interp(range(count), [*first, count], [*ticks, end]).tolist()
    return [at / 1000.0 / speed for at in times]
