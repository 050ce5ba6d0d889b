"""Puts of the same page at the same time: one call writes the page, and the others wait for that call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from asynccache.storage import PageKey, Result

HIT = Result.HIT


class OncePerKey:
    """The puts of one store. ``under_way``: the keys that are being written, each with the future of the call that
    writes it."""

    def __init__(self) -> None:
        self.under_way: dict[bytes, asyncio.Future[None]] = {}

    async def put(
        self, keys: Sequence[PageKey], results: list[Result], is_stored: Callable[[bytes], bool],
        write: Callable[[list[int]], Awaitable[None]],
    ) -> None:  # fmt: skip
        """Have the pages of ``keys`` written that are not stored. Pages that are stored already become HIT.

        ``write`` is called with the positions of pages that no other call is writing. It sets their results, and when
        it ends ``is_stored`` is right for them. If another call did not store a page, ``write`` is called for that
        page, too. What ``write`` raises is raised here. Cancelling it cancels ``write``.
        """
        under_way = self.under_way
        left = list(range(len(keys)))
        while left:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            fresh: list[int] = []
            shared: list[tuple[int, asyncio.Future[None]]] = []
            for i in left:
                key = keys[i][1]
                if is_stored(key):
                    results[i] = HIT
                elif key in under_way:
                    shared.append((i, under_way[key]))
                else:
                    under_way[key] = done
                    fresh.append(i)
            if fresh:
                try:
                    await write(fresh)
                finally:
                    for i in fresh:
                        del under_way[keys[i][1]]
                    done.set_result(None)
            for _, other in shared:
                await asyncio.wait([other])
            left = [i for i, _ in shared]
