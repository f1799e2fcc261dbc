"""Small models with weights that show bugs, ours and those of transformers."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from lm_from_scratch.models.gpt2 import GPT2Config, GPT2LMHeadModel
from lm_from_scratch.models.interface import CausalLM
from lm_from_scratch.models.qwen2 import Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.text.tokenizer_files import with_template

# Sizes that all differ, so that exchanged axes fail; Qwen2 has fewer key heads than heads.
TINY = dict(
    vocab_size=97,
    block_size=64,
    n_layer=3,
    n_head=4,
    n_embd=28,
    embd_pdrop=0.0,
    resid_pdrop=0.0,
    attn_pdrop=0.0,
    bos_token_id=2,
    eos_token_id=2,
)

QWEN2 = dict(
    vocab_size=97,
    block_size=128,
    n_layer=3,
    n_head=6,
    n_kv_head=2,
    n_embd=48,
    intermediate_size=56,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=2,
)


@torch.no_grad()
def enlarge_(model: nn.Module, seed: int = 0, std: float = 0.25) -> None:
    """Weights of std 0.25 and norms around 1: with the usual 0.02 most bugs do not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        scale = std if parameter.dim() > 1 else std / 2
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        if ("ln_" in name or "norm" in name) and name.endswith("weight"):
            parameter.add_(1.0)


def tiny_gpt2(seed: int = 0, std: float = 0.25, **changes: object) -> GPT2LMHeadModel:
    """A small GPT-2 in evaluation mode, with large random weights."""
    model = GPT2LMHeadModel(GPT2Config(**{**TINY, **changes})).eval()
    enlarge_(model, seed, std)
    return model


#: Every kind of RoPE, in the words of transformers.
ROPES = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
    },
    {
        "rope_type": "llama3", "factor": 4.0, "rope_theta": 10000.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    },
]  # fmt: skip


def tiny_qwen2(seed: int = 0, std: float = 0.25, **changes: object) -> Qwen2ForCausalLM:
    """A small Qwen2 in evaluation mode, with large random weights."""
    model = Qwen2ForCausalLM(Qwen2Config(**{**QWEN2, **changes})).eval()
    enlarge_(model, seed, std)
    return model


#: A latent of 16 numbers and a turned key of 4, for 4 heads: no two widths are alike. Dense; layers
#: from ``first_k_dense_replace`` on would have 8 experts.
DEEPSEEK_V3 = dict(
    vocab_size=97, block_size=128, n_layer=3, n_head=4, n_embd=30, intermediate_size=40,
    q_lora_rank=14, kv_lora_rank=16, qk_nope_head_dim=6, head_dim=4, v_head_dim=5,
    first_k_dense_replace=3, n_expert=8, top_k=3, expert_size=7, n_group=4, top_group=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def tiny_deepseek_v3(seed: int = 0, std: float = 0.25, **changes: object) -> DeepseekV3ForCausalLM:
    """A small DeepSeek-V3 in evaluation mode, with large random weights."""
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**{**DEEPSEEK_V3, **changes})).eval()
    enlarge_(model, seed, std)
    return model


def hf_twin(model: CausalLM) -> nn.Module:
    """The same model in transformers, carried over through a folder on disk."""
    from transformers import AutoModelForCausalLM as HFModel

    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, Path(folder) / "model")
        twin, report = HFModel.from_pretrained(Path(folder) / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    return twin.eval()


def tiny_hf(seed: int = 0, **changes: object) -> nn.Module:
    """A small random GPT-2 made by transformers."""
    from transformers import GPT2Config as HFConfig
    from transformers import GPT2LMHeadModel as HFModel

    config = dict(
        vocab_size=97, n_positions=64, n_layer=3, n_head=4, n_embd=28,
        embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, bos_token_id=2, eos_token_id=2,
    )  # fmt: skip
    model = HFModel(HFConfig(**{**config, **changes})).eval()
    enlarge_(model, seed)
    return model


def tiny_hf_qwen2(seed: int = 0, **changes: object) -> nn.Module:
    """A small random Qwen2 made by transformers."""
    from transformers import Qwen2Config as HFConfig
    from transformers import Qwen2ForCausalLM as HFModel

    config = dict(
        vocab_size=97, max_position_embeddings=128, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, hidden_size=48, intermediate_size=56, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = HFModel(HFConfig(**{**config, **changes})).eval()
    enlarge_(model, seed)
    return model


def ours_from_hf(twin: nn.Module) -> CausalLM:
    """The way back: a model of transformers, loaded by this package."""
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return from_pretrained(folder)


#: The template of ChatML, with what the assistant says marked as transformers wants it.
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}\
{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}\
{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def chat_tokenizer(
    folder: Path, template: str = CHATML, texts: tuple[str, ...] = (), vocab_size: int = 259
) -> Tokenizer:
    """A tokenizer with a chat template, in a folder; by default each byte is a token."""
    made = Tokenizer.train(texts, vocab_size, ["<|im_start|>", "<|im_end|>"])
    Tokenizer(made.backend, files=with_template(made.backend, template)).save(folder)
    return Tokenizer.load(folder)


def chat_folder(folder: Path, seed: int = 0, std: float = 0.1, **changes: object) -> Path:
    """A small Qwen2 that reads bytes, with the tokenizer of chats, in a folder."""
    ends = dict(vocab_size=259, n_layer=2, eos_token_id=0, pad_token_id=None)
    save_pretrained(tiny_qwen2(seed, std, **{**ends, **changes}), folder)
    chat_tokenizer(folder)
    return folder


def token_ids(*shape: int, seed: int = 1, low: int = 3, high: int = 97) -> torch.Tensor:
    """Random ids of the tiny vocabularies, none of them padding or an end (0 to 2)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


#: Which of 8 columns are real: every row of every batch has another length.
PADDINGS = {
    "none": [[1] * 8, [1] * 8],
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8],
    "right": [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8],
    "both": [[0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]],
    "inside": [[1, 1, 0, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1, 1, 1]],
}


def padded_ids(
    mask: list[list[int]], fill: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids with ``fill`` as padding, their positions, and which are real."""
    real = torch.tensor(mask)
    idx = token_ids(*real.shape).masked_fill(real == 0, fill)
    return idx, positions_from_mask(real), real == 1
