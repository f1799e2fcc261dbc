"""Which model a config is built into.

The table holds names, and :func:`build` imports the one that it needs: who reads this file, or
loads a GPT-2, meets no other architecture.
"""

from importlib import import_module

from lm_from_scratch.models.interface import CausalLM, Config

#: Of each config's class the file in ``models``, and the class of the model.
ARCHITECTURES = {
    "GPT2Config": "gpt2:GPT2LMHeadModel",
    "Qwen2Config": "qwen2:Qwen2ForCausalLM",
    "Qwen3Config": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeConfig": "qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextConfig": "qwen3_next:Qwen3NextForCausalLM",
    "DeepseekV3Config": "deepseek_v3:DeepseekV3ForCausalLM",
    "SmolLM3Config": "smollm3:SmolLM3ForCausalLM",
}


def build(config: Config) -> CausalLM:
    """A model with fresh random weights."""
    file, name = ARCHITECTURES[type(config).__name__].split(":")
    model: type[CausalLM] = getattr(import_module(f"lm_from_scratch.models.{file}"), name)
    return model(config)
