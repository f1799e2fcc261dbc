"""Which model a config is built into.

The table holds names, and :func:`build` imports the one that it needs: who reads this file, or
loads a GPT-2, meets no other architecture.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar, Protocol

from lm_from_scratch.models.interface import CausalLM

#: Of each config's class the file in ``models``, and the class of the model.
ARCHITECTURES = {
    "GPT2Config": "gpt2:GPT2LMHeadModel",
    "Qwen2Config": "qwen2:Qwen2ForCausalLM",
    "Qwen3Config": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeConfig": "qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextConfig": "qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5Config": "qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeConfig": "qwen3_5:Qwen3_5MoeForCausalLM",
    "DeepseekV3Config": "deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV4Config": "deepseek_v4:DeepseekV4ForCausalLM",
    "SmolLM3Config": "smollm3:SmolLM3ForCausalLM",
    "Gemma3Config": "gemma3:Gemma3ForCausalLM",
    "Gemma4Config": "gemma4:Gemma4ForCausalLM",
    "GptOssConfig": "gpt_oss:GptOssForCausalLM",
}


class Config(Protocol):
    """The numbers that every architecture's dataclass of numbers has."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        ...

    @property
    def n_layer(self) -> int:
        """Blocks."""
        ...

    @property
    def n_embd(self) -> int:
        """Features of a token."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """Keys that each layer sees; None for all of them."""
        ...

    @property
    def position_limit(self) -> int | None:
        """Positions that have an embedding; None where there is no limit."""
        ...


def build(config: Config) -> CausalLM:
    """A model with fresh random weights."""
    file, name = ARCHITECTURES[type(config).__name__].split(":")
    model: type[CausalLM] = getattr(import_module(f"lm_from_scratch.models.{file}"), name)
    return model(config)
