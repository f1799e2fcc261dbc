"""What each kernel becomes on an architecture, as JSON: `python tests/compile_kernels.py 80 86 90`.

Needs no GPU. :data:`LAUNCHES` calls the ordinary functions with tensors of real sizes; what they
would launch is compiled. test_kernels_compiled.py runs this in a process that does not interpret.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm_from_scratch.kernels.compilation import compiled_for
from lm_from_scratch.kernels.swiglu import swiglu


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What a model on a GPU computes with. The sizes matter, the numbers do not."""
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


#: A name, and a call with everything that follows from it. Sizes are those of Qwen2-0.5B.
LAUNCHES: dict[str, Callable[[], Any]] = {
    "swiglu": lambda: swiglu(half(64, 4864), half(64, 4864)).sum().backward(),
}


def main() -> None:
    rows = []
    for arch in map(int, sys.argv[1:]):
        for launch, call in LAUNCHES.items():
            start = time.perf_counter()
            with compiled_for(arch) as kernels:
                call()
            seconds = time.perf_counter() - start
            for kernel in {kernel.cubin: kernel for kernel in kernels}.values():
                rows.append(
                    dict(
                        launch=launch,
                        kernel=kernel.name,
                        arch=arch,
                        shared=kernel.shared,
                        registers=kernel.registers,
                        spills=kernel.spills,
                        seconds=round(seconds, 1),
                    )
                )
                line = (
                    "{launch:22}{kernel:32}sm_{arch:<4}{shared:7} B shared {registers:4} registers "
                    "{spills:4} B spilled {seconds:5} s"
                )
                print(line.format(**rows[-1]), file=sys.stderr)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
