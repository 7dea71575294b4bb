"""The machine code of the litmus: what the control breaks is the one rule that it is there to break."""

from __future__ import annotations

import pytest

from ferrule_server.kernels.cuda.litmus import CONTROL, SPECS, THREADS, WAITING
from ferrule_server.kernels.cuda.toolchain.compile import ARCHITECTURES, compile_spec
from ferrule_server.kernels.cuda.toolchain.machine_code import check


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_its_machine_code_keeps_the_rules_but_for_what_the_control_breaks(architecture: str) -> None:
    """Five launches fit a multiprocessor side by side: registers and threads of one leave room for the others."""
    breaches = {spec: check(spec, compile_spec(spec, architecture)) for spec in SPECS}
    assert breaches[WAITING] == []
    has_wait = not architecture.startswith("sm_8")
    assert {breach.rule for breach in breaches[CONTROL]} == ({"above the wait"} if has_wait else set())
    cubin = compile_spec(WAITING, architecture)
    assert 5 * THREADS <= 1024
    assert 5 * THREADS * cubin.num_registers <= 32768
