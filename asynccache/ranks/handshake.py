"""What ranks tell each other before they do anything together: everything that must be the same on all of them.

Law: ranks that differ in it never step together. The first field that differs is named, whatever else does.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from asynccache.errors import ConfigError

SCHEMA = 2  # of frames and of the protocol; to be raised with every change of either
ABSENT = "absent"

Plain: TypeAlias = "str | int | float | bool | Sequence[Plain] | Mapping[str, Plain] | None"
Description: TypeAlias = Mapping[str, Plain]


async def shake_hands(gather: Callable[[bytes], Awaitable[Sequence[bytes]]], description: Description) -> None:
    """Compare ``description`` with every other rank's; ``gather``: of the ranks' connections. Every rank calls it once,
    before the first step. Cancelling it leaves ``gather`` unusable.

    Raises:
        ConfigError: ranks differ; on every rank with the same sentence.
        RankFailure: a rank is gone or silent.
    """
    mine = json.dumps({"protocol": SCHEMA, **description})
    found = differing(dict(enumerate(map(json.loads, await gather(mine.encode())))))
    if found is not None:
        raise ConfigError(found)


def differing(descriptions: Mapping[int, Description]) -> str | None:
    """The first field, in the order of the lowest rank, that is not the same for all, in words; ``descriptions``: by
    rank. What stands inside of a mapping or a sequence is a field of its own."""
    flat = {rank: dict(_fields("", descriptions[rank])) for rank in sorted(descriptions)}
    for name in dict.fromkeys(name for fields in flat.values() for name in fields):
        holders: dict[str, list[int]] = {}
        for rank, fields in flat.items():
            holders.setdefault(fields.get(name, ABSENT), []).append(rank)
        if len(holders) > 1:
            held = [f"{value} on {_ranks(ranks)}" for value, ranks in holders.items()]
            return f"{name} differs between ranks: {'; '.join(held)}"
    return None


def _fields(name: str, value: Plain) -> Iterator[tuple[str, str]]:
    """``value`` in leaves: the path to each, and what it is."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _fields(f"{name}.{key}" if name else key, part)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for i, part in enumerate(value):
            yield from _fields(f"{name}[{i}]", part)
    else:
        yield name, json.dumps(value)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
