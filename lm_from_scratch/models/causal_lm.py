"""What the architectures have in common.

A model maps token ids to logits, ``model(idx, positions=, documents=, cache=, keep=)``. All but
the ids go by name, so that a mask of 0s and 1s, which is second elsewhere, is not taken for
positions (:func:`~lm_from_scratch.attention.visibility.positions_from_mask` makes them of it). Its
``backbone`` ends with the hidden states, its ``head_weight`` (V, C) turns them into logits, and its
``config`` holds its numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lm_from_scratch.limits import shown
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lm_from_scratch.models.qwen3_next import Qwen3NextConfig, Qwen3NextForCausalLM
from lm_from_scratch.models.smollm3 import SmolLM3Config, SmolLM3ForCausalLM

CausalLM = GPT2LMHeadModel | Qwen2ForCausalLM  # those after Qwen2 are kinds of it
Config = GPT2Config | Qwen2Config

#: The model of each config.
MODELS: dict[type[Any], Callable[[Any], CausalLM]] = {
    GPT2Config: GPT2LMHeadModel,
    Qwen2Config: Qwen2ForCausalLM,
    Qwen3Config: Qwen3ForCausalLM,
    Qwen3NextConfig: Qwen3NextForCausalLM,
    Qwen3MoeConfig: Qwen3MoeForCausalLM,
    DeepseekV3Config: DeepseekV3ForCausalLM,
    SmolLM3Config: SmolLM3ForCausalLM,
}


def build(config: Config) -> CausalLM:
    """A model with fresh random weights."""
    return MODELS[type(config)](config)


def check_no_states(model: CausalLM, what: str) -> None:
    """Raises ``ValueError`` for a ``model`` whose layers keep a state in place of keys, named by
    ``what`` would take tokens back or share them."""
    if layers := getattr(model.config, "recurrent_layers", []):
        raise ValueError(
            f"{what} is not supported for a {type(model).__name__}: layers {shown(layers)} keep a "
            "state, which cannot go back to an earlier token"
        )


@torch.no_grad()
def randomize_(model: nn.Module, seed: int = 0, std: float = 0.25) -> None:
    """Fill every parameter with large random numbers, so that a mistake shows in the logits.

    Normal with deviation ``std``; the weights of norms are around 1. The usual 0.02 makes the
    logits of all tokens nearly equal, and hides most mistakes. Equal names and shapes get equal
    numbers from one ``seed``, whatever order the parameters were registered in.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.normal_(0.0, std, generator=generator)
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter.add_(1.0)
