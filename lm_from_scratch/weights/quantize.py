"""A built model whose weights are quantised, and back.

:func:`quantize_` puts a :class:`~lm_from_scratch.weights.quantized_weight.QuantizedWeight` into
the place of each matrix that a token is multiplied with. The model's own code does not change: it
goes on calling ``F.linear``, which the weight answers itself.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.layers.head import Head
from lm_from_scratch.weights.int4 import Int4Weight
from lm_from_scratch.weights.int8 import Int8Weight
from lm_from_scratch.weights.packed_int8 import use_packed_int8_
from lm_from_scratch.weights.quantized_weight import QuantizedWeight
from lm_from_scratch.weights.swap import swap_parameters_

#: The classes by their number of bits.
WEIGHTS: dict[int, type[QuantizedWeight]] = {8: Int8Weight, 4: Int4Weight}


def quantize_(
    model: nn.Module,
    bits: int = 8,
    group_size: int | None = None,
    select: Callable[[str], bool] = lambda name: True,
    weight_only: bool = False,
) -> None:
    """Quantise the weights of a built model that a token is multiplied with, in place.

    These are the weights of every ``nn.Linear`` and of the head, tied or not; ``select`` says by
    name which of them. An embedding that is only looked up, norms and biases stay as they are. The
    quantised weights are swapped in: an optimizer that holds a weight, or a module that shares it,
    goes on holding it. They need no gradient. All are quantised, or none.

    ``group_size`` is the length of a group; by default a row with 8 bits and 64 with 4 bits.

    With 8 bits and rows as groups, products are computed in 8 bits where the processor has a kernel
    for that: activations are rounded, too. With ``weight_only`` they are not, and many rows take
    longer (:mod:`~lm_from_scratch.weights.packed_int8`). With 4 bits they never are.

    A result of the model that still has a graph holds the weights: free it first, or compute it
    under ``torch.no_grad()``. Raises ``ValueError``, and changes nothing, for other ``bits``, a
    ``group_size`` that does not fit, and a layer that is no plain one.
    """
    if type(bits) is not int or bits not in WEIGHTS:
        raise ValueError(f"bits={bits!r} must be one of {sorted(WEIGHTS, reverse=True)}")
    for name, module in model.named_modules():
        odd = isinstance(module, nn.Linear) and type(module) is not nn.Linear
        if odd and select(f"{name}.weight".lstrip(".")):
            raise ValueError(
                f"{name} is a {type(module).__name__}: what else reads its weight may not know "
                "codes. Quantise before you change a layer, or leave it out with select"
            )
    candidates = multiplied(model)
    weights = {name: p for name, p in candidates.items() if select(name)}
    if not weights:
        raise ValueError(f"select chose none of the weights {list(candidates)}")
    new: dict[str, Tensor] = {}
    for name, weight in weights.items():
        try:
            new[name] = WEIGHTS[bits].quantize(weight.detach(), group_size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    swap_parameters_(model, new)
    use_packed_int8_(model, weight_only, new)


def dequantize_(model: nn.Module) -> None:
    """Swap each quantised weight for the plain matrix that it stands for, which stays frozen."""
    quantized = quantized_weights(model)
    swap_parameters_(model, {name: weight.dequantize() for name, weight in quantized.items()})


def multiplied(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of every ``nn.Linear`` and of the head, by name. Raises ``ValueError`` for a head
    that computes with another function."""
    weights = set()
    for module in model.modules():
        if isinstance(module, Head) and module.product is not F.linear:
            raise ValueError(
                f"the head computes with {module.product}: quantise before you change that"
            )
        if isinstance(module, nn.Linear | Head):
            weights.add(id(module.weight))
    return {name: p for name, p in model.named_parameters() if id(p) in weights}


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """The parameters that are quantised, by name."""
    return {n: p for n, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
