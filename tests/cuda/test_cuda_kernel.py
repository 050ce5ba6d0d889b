"""The copy kernel, compiled without a GPU: needs cupy and NVRTC, nothing else. ``make test-kernels`` brings both."""

from __future__ import annotations

import pytest

from asynccache.memory.cuda import kernels

pytest.importorskip("cupy", reason="cupy is not installed: make test-kernels brings it")


def ptx_for(capability: tuple[int, int]) -> str:
    try:
        return kernels.compile_for(capability, machine_code=False).decode()
    except kernels.NoCompiler as error:
        pytest.skip(str(error))


def test_it_has_four_loads_of_16_bytes_in_flight_before_its_first_store() -> None:
    ptx = ptx_for((9, 0))
    assert kernels.NAME in ptx
    lines = [line.split()[0] for line in ptx.splitlines() if "L1::no_allocate" in line]
    assert lines == ["ld.global.L1::no_allocate.v4.u32"] * 4 + ["st.global.L1::no_allocate.v4.u32"] * 4


def test_its_table_is_read_where_the_driver_puts_it() -> None:
    """A thread that looks a row up in a copy of its own would fill four kilobytes of local memory first."""
    ptx = ptx_for((9, 0))
    assert ".local" not in ptx
    assert f".b8 {kernels.NAME}_param_0[{kernels.TABLE.itemsize}]" in ptx


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_it_compiles_to_machine_code(capability: tuple[int, int]) -> None:
    ptx_for(capability)
    assert kernels.compile_for(capability)[:4] == b"\x7fELF"


def test_a_gpu_that_nvrtc_does_not_know_yet_gets_ptx_that_its_driver_translates() -> None:
    ptx_for((9, 0))
    newest = max(kernels.architectures())
    assert f".target sm_{newest[0]}{newest[1]}" in kernels.image_for((99, 0)).decode()
    assert kernels.image_for(newest)[:4] == b"\x7fELF"


def test_what_does_not_compile_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    ptx_for((9, 0))
    monkeypatch.setattr(kernels, "SOURCE", "__global__ void broken() { nothing; }")
    with pytest.raises(RuntimeError, match="nothing"):
        kernels.compile_for((9, 0))
