"""Finds settings that waste room, and says each in a sentence to those who open the cache. Looks at settings alone."""

from __future__ import annotations

from asynccache.core.settings import ComponentKind, CoreConfig

_MOST_TWICE = 0.25
"""The share of the smaller tier that may hold copies of pages that the other tier has. Such copies are made ahead, so
that requests do not wait for them."""


def wasted(config: CoreConfig) -> tuple[str, ...]:
    """Return a sentence for each setting that leaves room on the host unused; none where there is no host tier.

    Nothing is said of ``write_through_selective``. The pages that it leaves out are those that one request used:
    whether they would have been hit depends on the load, and no size of the host tells.
    """
    full = config.components[0]
    if not full.host:
        return ()
    found = []
    ahead = int(min(full.device, full.host) * config.write_back_watermark)
    if config.write_back_watermark > _MOST_TWICE:
        found.append(
            f"write_back_watermark={config.write_back_watermark}: up to {ahead} pages are on both device and host, so "
            f"that both hold {ahead} pages less than the {full.device + full.host} that they have room for; "
            f"{_MOST_TWICE} is enough unless requests wait for copies"
        )
    for component in config.components[1:]:
        window = min(-(-component.window // config.page_size) or 1, full.host)
        if component.host < window:
            found.append(
                f"{component.kind.name.lower()}: the host has room for {component.host} of its pages, a match that "
                f"ends there needs {window}: the host's {full.host} pages of full serve only requests for which the "
                f"device has the {window}"
            )
        elif component.kind is ComponentKind.MAMBA and component.host * full.device < full.host:
            needed = -(-full.host // full.device)
            found.append(
                f"mamba: the host has room for {component.host} states and for {full.host} pages of full. A prompt has "
                f"{full.device} pages at most, and its pages are of use with the state at its end only: fewer than "
                f"{needed} states cannot make use of that room, and most loads need many more (`asynccache plan`)"
            )
    return tuple(found)
