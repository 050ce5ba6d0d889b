"""``python -m asynccache.configuration docs/configuration.md`` writes the reference of all settings into that page."""

import sys
from pathlib import Path

from asynccache.configuration.reference import renewed

page = Path(sys.argv[1])
page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
