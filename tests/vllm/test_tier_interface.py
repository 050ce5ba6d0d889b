"""The versions of vLLM that the tier takes, and its message where there is none. vLLM's classes are written out here,
so vLLM is not needed."""

# ruff: noqa: B027

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import asynccache_vllm
import pytest


class Base(ABC):
    """As vLLM 0.32 and 0.33 have it, where we use it."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, backpressure_detector: Any = None
    ) -> None: ...
    @abstractmethod
    def lookup(self, key: bytes, req_context: Any) -> Any: ...
    @abstractmethod
    def submit_store(self, job_metadata: Any) -> None: ...
    @abstractmethod
    def submit_load(self, job_metadata: Any) -> None: ...
    @abstractmethod
    def get_finished_jobs(self) -> Any: ...
    @abstractmethod
    def on_new_request(self, req_context: Any) -> Any: ...
    @abstractmethod
    def drain_jobs(self) -> None: ...
    def on_request_finished(self, req_context: Any) -> None: ...
    def on_schedule_end(self, context: Any) -> None: ...
    def take_events(self) -> Any: ...
    def get_stats(self) -> Any: ...
    def shutdown(self) -> None: ...
    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> Any: ...


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: Any


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4


TYPES: dict[str, type] = {
    one.__name__: one for one in (TransferJob, JobResult, ScheduleEndContext, LookupResult)
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some vLLM."""
    monkeypatch.setattr(asynccache_vllm.interface, "installed", lambda name: "0.34.1")


def test_the_interface_of_the_tested_versions_is_taken() -> None:
    asynccache_vllm.interface.check_interface(Base, TYPES)


def test_more_with_a_default_is_taken() -> None:
    class More(Base):
        @abstractmethod
        def submit_load(self, job_metadata: Any, expedited: bool = False) -> None: ...

    asynccache_vllm.interface.check_interface(More, TYPES)


def another_method() -> type:
    class New(Base):
        @abstractmethod
        def submit_copy(self, job: Any) -> None: ...

    return New


def another_parameter() -> type:
    class New(Base):
        @abstractmethod
        def lookup(self, key: bytes, req_context: Any, step: int) -> Any: ...  # type: ignore[override]

    return New


def another_name() -> type:
    class New(Base):
        @abstractmethod
        def submit_store(self, job: Any) -> None: ...

    return New


def one_less() -> type:
    class New(Base):
        def drain_jobs(self) -> None: ...

    return New


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("base", "said"),
    [
        (another_method, "its secondary tiers must have the method submit_copy()"),
        (one_less, "its secondary tiers need not have the method drain_jobs()"),
        (another_parameter, "lookup() of its secondary tiers has an additional parameter step"),
        (another_name, "submit_store() of its secondary tiers has no parameter job_metadata"),
    ],
)
def test_another_interface_is_refused_in_a_sentence(base: Callable[[], type], said: str) -> None:
    with pytest.raises(ImportError) as refused:
        asynccache_vllm.interface.check_interface(base(), TYPES)
    assert str(refused.value) == (
        f"asynccache_vllm does not work with vLLM 0.34.1: {said}. It was tested with 0.32.0, and without an engine "
        f"with 0.33.0"
    )


@pytest.mark.usefixtures("installed")
def test_another_result_is_refused() -> None:
    class Other(NamedTuple):
        job_id: int
        success: bool

    with pytest.raises(ImportError, match="its JobResult has no successful_keys"):
        asynccache_vllm.interface.check_interface(Base, {**TYPES, "JobResult": Other})


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynccache_vllm.interface, "installed", lambda name: None)
    with pytest.raises(ImportError, match=r"needs vLLM, which is not installed here: pip install vllm==0\.32\.0"):
        asynccache_vllm.register()


def test_importing_it_imports_nothing_of_vllm_and_nothing_heavy() -> None:
    program = "import sys, asynccache_vllm; print(sorted({'vllm', 'torch', 'numpy', 'asyncio'} & set(sys.modules)))"
    path = [entry for entry in sys.path if entry]
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}; {program}"],
                          capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_no_question_for_vllm() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tier'"):
        asynccache_vllm.Tier  # noqa: B018


def test_vllm_finds_it_by_an_entry_point() -> None:
    found = [one for one in entry_points(group="vllm.general_plugins") if one.name == "asynccache"]
    if not found:
        pytest.skip("asynccache is not installed here since it has the entry point: pip install -e .")
    assert found[0].value == "asynccache_vllm:register"


def test_a_vllm_without_tiers_is_told_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    def no_module(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(asynccache_vllm.interface, "installed", lambda name: "0.20.0")
    monkeypatch.setattr(asynccache_vllm, "import_module", no_module)
    asynccache_vllm.register()
    assert "the tier type 'asynccache' was not registered: asynccache_vllm does not work with vLLM 0.20.0" in told.text
