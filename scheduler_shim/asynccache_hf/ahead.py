"""Who waits for whom: a prompt that begins as one before it, which is being computed, waits for that one's pages.

Otherwise requests that come together would each compute what they share: a lease sees what is in the cache when it is
taken, and while the first of them is computed nothing is.

Laws: a prompt waits only for those that came before it, so there is always one that waits for nobody; and it holds
nothing while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Beginning = tuple[str | bytes | None, bytes]
"""A namespace and a first page: what those that share anything have in common."""


class Prompt:
    """One that has come and is not computed yet. ``reached``: so many of its tokens nobody has to wait for, since they
    are cached, or about to be loaded."""

    def __init__(self, beginning: Beginning, tokens: Tokens, ahead: list[tuple[Prompt, int]]) -> None:
        """``ahead``: those before it that begin alike, and how far."""
        self.beginning = beginning
        self.tokens = tokens
        self.reached = 0
        self._ahead = ahead
        self._gone = False
        self._moved = asyncio.Event()

    def reach(self, tokens: int) -> None:
        self.reached = max(self.reached, tokens)
        self._tell()

    async def turn(self) -> None:
        """Return when nobody ahead is computing what this one begins with. Cancelling it changes nothing."""
        for other, shared in self._ahead:
            while self.reached < shared and not other._gone:
                if other.reached >= shared:
                    self.reach(shared)  # which nobody behind has to wait for once more
                else:
                    await other._moved.wait()
        self._ahead = []

    def go(self) -> None:
        """It computes nothing more."""
        self._gone, self._ahead = True, []
        self._tell()

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class Prompts:
    """Those that are not computed yet, in the order in which they came. For one event loop."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._alike: dict[Beginning, list[Prompt]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._alike.values()))

    def enter(self, tokens: Sequence[int], extra_key: str | bytes | None) -> Prompt:
        """``tokens``, in the namespace ``extra_key``, are the next to be computed. ``leave`` has to follow."""
        own = np.asarray(tokens, np.int32)
        beginning = extra_key, own[: self._page_size].tobytes()
        before = self._alike.setdefault(beginning, [])
        ahead = [(each, shared) for each in before if (shared := self._shared(own, each.tokens))]
        before.append(Prompt(beginning, own, ahead))
        return before[-1]

    def leave(self, prompt: Prompt) -> None:
        """All of it is computed, or nobody will compute it. May be repeated."""
        prompt.go()
        alike = self._alike.get(prompt.beginning, [])
        if prompt in alike:
            alike.remove(prompt)
            if not alike:
                del self._alike[prompt.beginning]

    def _shared(self, own: Tokens, other: Tokens) -> int:
        """Tokens in whole pages. The last token of a prompt is always computed."""
        length = min(len(own) - 1, len(other))
        differ = np.flatnonzero(own[:length] != other[:length])
        return (int(differ[0]) if len(differ) else length) // self._page_size * self._page_size
