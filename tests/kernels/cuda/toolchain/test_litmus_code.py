"""The machine code of the litmus: what the control breaks is the one rule that it is there to break."""

from __future__ import annotations

from ferrule_server.kernel_builder.compile import ARCHITECTURES, assemble, has_dependent_launch, write_ptx
from ferrule_server.kernels.cuda.litmus import CONTROL, THREADS, WAITING
from tools.kernels.machine_code import take_apart


def test_its_machine_code_keeps_the_rules_but_for_what_the_control_breaks() -> None:
    """Five launches fit a multiprocessor side by side: registers and threads of one leave room for the others."""
    ptx = {spec: write_ptx(spec) for spec in (WAITING, CONTROL)}
    for architecture in ARCHITECTURES:
        waiting, control = take_apart([assemble(spec, text, architecture) for spec, text in ptx.items()])
        assert waiting.breaches() == {}
        assert set(control.breaches()) == ({"above the wait"} if has_dependent_launch(architecture) else set())
        assert 5 * THREADS <= 1024
        assert 5 * THREADS * waiting.compiled.num_registers <= 32768
