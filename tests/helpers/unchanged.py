"""What a refusal must leave as it was: the classes of modules, and every parameter."""

import torch
from torch import Tensor, nn

from lm_from_scratch.weights.quantized_weight import QuantizedWeight


def held(weight: QuantizedWeight) -> list[Tensor]:
    return [getattr(weight, name) for name in weight.held]


def assert_same(ours: Tensor, want: Tensor) -> None:
    """The same class, dtype and contents, bit by bit."""
    assert type(ours) is type(want) and ours.dtype == want.dtype and ours.shape == want.shape
    assert isinstance(ours, QuantizedWeight) and isinstance(want, QuantizedWeight)
    assert ours.group_size == want.group_size and ours.device == want.device
    for a, b in zip(held(ours), held(want), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def snapshot(model: nn.Module) -> tuple[list[type], list[tuple[str, int, type, bool, Tensor]]]:
    """What a refusal must leave as it is: the classes of modules, and every parameter."""
    parameters = [
        (n, id(p), type(p), p.requires_grad, p.detach().clone())
        for n, p in model.named_parameters()
    ]
    return [type(module) for module in model.modules()], parameters


def assert_unchanged(
    model: nn.Module, before: tuple[list[type], list[tuple[str, int, type, bool, Tensor]]]
) -> None:
    classes, parameters = before
    assert [type(module) for module in model.modules()] == classes
    pairs = zip(parameters, model.named_parameters(), strict=True)
    for (name, *known, value), (now, p) in pairs:
        assert (name, *known) == (now, id(p), type(p), p.requires_grad)
        if isinstance(p, QuantizedWeight):
            assert_same(p, value)
        else:
            assert torch.equal(p.nan_to_num(), value.nan_to_num())
