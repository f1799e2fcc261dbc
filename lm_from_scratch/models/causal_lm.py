"""What the architectures have in common.

A model maps token ids to logits, ``model(idx, positions=, documents=, cache=, keep=)``. All but
the ids go by name, so that a mask of 0s and 1s, which is second elsewhere, is not taken for
positions (:func:`~lm_from_scratch.attention.visibility.positions_from_mask` makes them of it). Its
``backbone`` ends with the hidden states, its ``head_weight`` (V, C) turns them into logits, and its
``config`` holds its numbers.
"""

import torch
from torch import nn

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

CausalLM = GPT2LMHeadModel | Qwen2ForCausalLM
Config = GPT2Config | Qwen2Config


def build(config: Config) -> CausalLM:
    """A model with fresh random weights."""
    return GPT2LMHeadModel(config) if isinstance(config, GPT2Config) else Qwen2ForCausalLM(config)


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
