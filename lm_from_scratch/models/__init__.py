"""Complete architectures, one file each, and what they have in common.

A model maps token ids to logits, ``model(idx, positions, documents, cache, keep)``. Its
``backbone`` ends with the hidden states, its ``head_weight`` (V, C) turns them into logits, and its
``config`` holds its numbers.
"""

from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM

CausalLM = GPT2LMHeadModel | Qwen2ForCausalLM
Config = GPT2Config | Qwen2Config


def build(config: Config) -> CausalLM:
    """A model with fresh random weights."""
    return GPT2LMHeadModel(config) if isinstance(config, GPT2Config) else Qwen2ForCausalLM(config)
