"""The stress tool on every kind of store while trouble comes and goes; see ``failing``."""

from __future__ import annotations

import pytest

from tests.stores import failing


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow(course.seconds) if course.seconds else pytest.mark.soak)
    for name, course in failing.COURSES.items()
])  # fmt: skip
def test_nothing_goes_wrong_while_a_store_fails(name: str) -> None:
    assert failing.run(name).phases
