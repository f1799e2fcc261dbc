"""A model and its loss in one module, which a run makes small and DDP and FSDP wrap."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.training.loss import causal_lm_loss, chunked_causal_lm_loss


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Matrix products in bfloat16 if ``dtype`` says so; everything else stays float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


class Objective(nn.Module):
    """A model and its loss. It is called with the fields of a batch, and computes products in
    ``dtype``."""

    model: Any

    def __init__(self, model: nn.Module, dtype: str = "float32") -> None:
        super().__init__()
        self.model, self.dtype = model, dtype


class OwnLosses:
    """A head that brings its own loss: that of logits and targets, and that of hidden states, the
    weight and targets, which never holds the logits."""

    losses: tuple[Callable[..., Tensor], Callable[..., Tensor]]


class NextTokenLoss(Objective):
    """The loss of the next token; ``chunked`` never holds the logits. It is computed by the
    functions of the head, if it has its own, as with kernels."""

    def __init__(self, model: CausalLM, dtype: str = "float32", chunked: bool = False) -> None:
        super().__init__(model, dtype)
        if chunked and model.head.cap is not None:
            raise ValueError(f"the head has a cap={model.head.cap}: the loss needs the logits")
        self.chunked = chunked
        self.loss: Callable[..., Tensor]
        self.chunked_loss: Callable[..., Tensor]
        self.loss, self.chunked_loss = causal_lm_loss, chunked_causal_lm_loss
        if isinstance(model.head, OwnLosses):
            self.loss, self.chunked_loss = model.head.losses

    def forward(
        self,
        idx: Tensor,
        targets: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """The mean loss over the targets (B, T) of the tokens ``idx``, at ``positions`` and in
        ``documents`` (B, T)."""
        with autocast(idx.device, self.dtype):
            if self.chunked:
                x = self.model.backbone(idx, positions=positions, documents=documents)
                return self.chunked_loss(x, self.model.head.weight, targets)
            return self.loss(self.model(idx, positions=positions, documents=documents), targets)


def objective_of(model: nn.Module, dtype: str = "float32") -> nn.Module:
    """The :class:`NextTokenLoss` of a language model, compiled or not; an objective, wrapped or
    not, as it is."""
    plain = getattr(model, "_orig_mod", model)
    return NextTokenLoss(cast(CausalLM, model), dtype) if isinstance(plain, CausalLM) else model
