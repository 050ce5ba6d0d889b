"""The site builds without a warning and without a network, and loads nothing from another host."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.processes import ROOT, run
from tests.workers import made_once

pytest.importorskip("material")

_LOADS = {"script": "src", "img": "src", "iframe": "src", "video": "src", "link": "href", "use": "href"}
_CALLED = re.compile(r"url\(\s*['\"]?(?:https?:)?//|@import\s+['\"]?(?:https?:)?//")


class _Loads(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in _LOADS and values.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(values.get(_LOADS[tag]) or "")


def build(folder: Path) -> None:
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "HTTP", "HTTPS")}
    # not --quiet: what is not shown is not counted, and then nothing is strict
    done = run("-m", "mkdocs", "build", "--strict", "--site-dir", folder, cwd=ROOT,
               env=nowhere | {"NO_MKDOCS_2_WARNING": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all workers of a run."""
    return made_once(tmp_path_factory, "site", build)


@pytest.mark.slow
def test_nothing_comes_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        loads = _Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.found
        assert not [url for url in loads.found if re.match(r"(https?:)?//", url)], page
    for sheet in site.rglob("*.css"):
        assert not _CALLED.search(sheet.read_text(encoding="utf-8")), sheet


@pytest.mark.slow
def test_the_reference_has_what_it_promises(site: Path) -> None:
    cache = (site / "api/cache.html").read_text(encoding="utf-8")
    import asynccache

    for name in sorted(set(asynccache.__all__) - {"__version__", "load_config"}):
        assert re.search(rf'id="asynccache\.[\w.]*\b{name}"', cache), name
    shim = (site / "api/shim.html").read_text(encoding="utf-8")
    assert 'id="asynccache_shim.scheduler.Scheduler.submit"' in shim
    assert 'id="asynccache_hf.prefix.PrefixCache.generate"' in shim
    backend = (site / "api/backend.html").read_text(encoding="utf-8")
    assert 'id="asynccache.storage.contract.StorageBackend.get"' in backend


@pytest.mark.slow
def test_pictures_are_in_the_pages(site: Path) -> None:
    assert (site / "concepts.html").read_text(encoding="utf-8").count("<svg viewBox") >= 5
    assert "--8&lt;--" not in "".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
