from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def page(report: Mapping[str, Any]) -> str:
    return ""
