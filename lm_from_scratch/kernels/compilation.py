"""What a kernel becomes: machine code for any NVIDIA architecture, made on a machine without a GPU.

The assembler of Triton's wheel needs no driver. :func:`compiled_for` compiles what the ordinary
functions of this package would launch, instead of launching it::

    with compiled_for(90) as kernels:
        swiglu(gate, up)  # CPU tensors; nothing is computed
    kernels[0].registers, kernels[0].shared

Shared memory and registers decide whether a kernel fits on an architecture, and how many of its
programs run at once; a *spill*, a number that found no register, goes to memory and back. The
instructions show which units of the chip are used.

The process must not interpret. Two internals of Triton are replaced meanwhile, its driver and the
launch; Triton's own ahead-of-time tools do the same.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # the default; 3.9 warns where it is unset

import triton
from triton.backends.compiler import GPUTarget

from lm_from_scratch.kernels import device

#: Bytes of shared memory that one program may have, by architecture (compute capability x 10).
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its name, its assembly, and what it takes."""

    name: str
    arch: int
    ptx: str
    cubin: bytes
    shared: int  # bytes

    @cached_property
    def resources(self) -> tuple[int, int]:
        """Registers per thread, and bytes of its stack, from the bundled ``cuobjdump``.

        Raises ``RuntimeError`` if that says nothing.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(self.cubin)
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.search(r"REG:(\d+) STACK:(\d+)", text)
        if found is None:
            raise RuntimeError(f"cuobjdump said nothing of the registers of {self.name}: {text!r}")
        return int(found[1]), int(found[2])

    @property
    def registers(self) -> int:
        """Registers of a thread; 255 is the most it can have."""
        return self.resources[0]

    @property
    def spills(self) -> int:
        """Bytes of a thread's stack: numbers that found no register."""
        return self.resources[1]

    def names(self, instruction: str) -> list[str]:
        """The instructions in the assembly (PTX) whose full names begin so, in their order."""
        name = rf"{re.escape(instruction)}[\w.:]*"
        return re.findall(rf"^\s*(?:@!?%p\d+\s+)?({name})", self.ptx, re.M)

    def count(self, instruction: str) -> int:
        """How often an instruction stands in the assembly, by the beginning of its name."""
        return len(self.names(instruction))


class NoDriver:
    """Answers what a launch asks a driver, for an architecture that need not be there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        """The architecture."""
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Any number."""
        return self.arch  # the key under which a kernel is kept

    def get_current_stream(self, device: Any = None) -> int:
        """Any number."""
        return 0


@contextmanager
def compiled_for(arch: int) -> Iterator[list[Compiled]]:
    """Compile each kernel that is launched within the block, for ``arch``; nothing runs.

    Yields the list that they are added to. What is launched several times is compiled once and
    listed each time. Raises ``RuntimeError`` in a process whose kernels are interpreted.
    """
    if device.INTERPRETED:
        raise RuntimeError("kernels of this process are interpreted: unset TRITON_INTERPRET")
    kernels: list[Compiled] = []

    def compile_instead(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            made = kernel.warmup(*args, grid=grid, **kwargs)
            asm = made.asm
            kernels.append(
                Compiled(made.name, arch, asm["ptx"], asm["cubin"], made.metadata.shared)
            )

        return launch

    driver, launch = triton.runtime.driver, triton.KernelInterface.__getitem__
    active = driver._active
    driver.set_active(NoDriver(arch))
    triton.KernelInterface.__getitem__ = compile_instead
    device.compiling_only = True
    try:
        yield kernels
    finally:
        device.compiling_only = False
        triton.KernelInterface.__getitem__ = launch
        driver._active = active
