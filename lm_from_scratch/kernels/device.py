"""Where a kernel may run, and what it is told there.

A Triton kernel is compiled for a CUDA device at its first launch. With ``TRITON_INTERPRET=1`` set
before Triton is imported, NumPy executes it instead, one program after the other: slow, and good
for finding out whether it is right. One process does one of the two.
"""

import torch
import triton
from torch import Tensor
from torch.autograd import forward_ad
from triton.runtime.interpreter import InterpretedFunction

#: Whether kernels of this process are interpreted.
INTERPRETED = type(triton.language.sum) is InterpretedFunction

if triton.knobs.runtime.interpret and not INTERPRETED:
    raise RuntimeError(
        "TRITON_INTERPRET was set after triton was imported, which leaves kernels that are half "
        "interpreted: set it before the first import of triton, torch._dynamo or torch._inductor"
    )

#: What kernels compute with. Sums and everything between load and store are float32.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

#: Set while :mod:`~lm_from_scratch.kernels.compilation` compiles what a launch would run.
compiling_only = False


def check_device(kernel: str, **tensors: Tensor | None) -> None:
    """Raises ``ValueError`` unless ``kernel`` can run on these tensors, given by their names.

    They must be on one device, a CUDA one, or the CPU in a process whose kernels are interpreted;
    and those of floating point of one of the :data:`DTYPES`. The interpreter computes bfloat16
    wrongly, so it is refused there. Kernels have gradients in reverse mode: in forward mode
    (``torch.func.jvp``) PyTorch would take the derivative of its operators for 0.
    """
    if forward_ad._current_level >= 0:
        raise ValueError(
            f"{kernel}: kernels have no derivatives in forward mode: use the function of "
            "lm_from_scratch that the kernel stands beside"
        )
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, device = next((name, tensor.device) for name, tensor in given.items())
    for name, tensor in given.items():
        if tensor.device != device:
            raise ValueError(
                f"{kernel}: {first} is on {device}, {name} on {tensor.device}; they must be on one"
            )
        number = tensor.is_floating_point() or tensor.is_complex()
        if number and tensor.dtype not in DTYPES:
            raise ValueError(f"{kernel}: {name} is {tensor.dtype}; kernels compute in {DTYPES}")
        if INTERPRETED and tensor.dtype == torch.bfloat16:
            raise ValueError(
                f"{kernel}: {name} is bfloat16, which Triton's interpreter computes wrongly: use "
                "float32 or float16, or a GPU"
            )
    if device.type != ("cpu" if INTERPRETED else "cuda") and not compiling_only:
        needed = (
            "kernels of this process are interpreted (TRITON_INTERPRET=1), which is for the CPU"
            if INTERPRETED
            else "a kernel needs a CUDA device; to interpret it on a CPU, set TRITON_INTERPRET=1 "
            "before triton is imported"
        )
        raise ValueError(f"{kernel}: {first} is on {device}, but {needed}")


def check_alike(kernel: str, **tensors: Tensor) -> None:
    """Raises ``ValueError`` unless the tensors have one shape and one dtype, a floating one."""
    (first, like), *rest = tensors.items()
    if not like.is_floating_point():
        raise ValueError(f"{kernel}: {first} is {like.dtype}; kernels compute in {DTYPES}")
    for name, tensor in rest:
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"{kernel}: {first} is {like.dtype} of shape {tuple(like.shape)}, {name} "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}; they must agree"
            )
