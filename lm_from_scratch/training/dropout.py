"""Dropout for a model whose architecture has none, put into a built one."""

import torch.nn.functional as F
from torch import Tensor, nn

from lm_from_scratch.layers.hyper_connections import HyperConnection
from lm_from_scratch.layers.norm import RMSNorm, ZeroCentredRMSNorm
from lm_from_scratch.limits import Share, require
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM


def residual_dropout_(model: Qwen2ForCausalLM, dropout: float) -> None:
    """In training, drop a share of the embeddings, and of what every attention and MLP adds.

    GPT-2 has these three in its config. Qwen2 has none of them, because it sees each text about
    once; a small model that reads a small corpus many times needs them.
    """
    require(Share, dropout=dropout)

    def drop(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return F.dropout(out, dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for block in model.model.layers:
        for part in block.children():
            if not isinstance(part, RMSNorm | ZeroCentredRMSNorm | HyperConnection):
                part.register_forward_hook(drop)
