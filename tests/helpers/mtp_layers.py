"""Layers for multi-token prediction with weights that show bugs, ours and those of transformers."""

import random
from typing import Any

import torch
from tiny_models import ROPES, enlarge_

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.training.mtp_loss import mtp_losses

#: The sizes of families with experts; DeepSeek-V3's cache holds a latent, too.
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=6, moe_intermediate_size=12, norm_topk_prob=True, head_dim=8),
    "deepseek_v3": dict(
        n_routed_experts=6, moe_intermediate_size=12, n_group=2, topk_group=1, n_shared_experts=1,
        kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=7, head_dim=4,
    ),
}  # fmt: skip


def theirs(family: str, seed: int) -> Any:
    """A small random model of that family made by transformers, of drawn sizes."""
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    draw = random.Random(f"{family} {seed} mtp")
    n_kv_head, shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    n_layer = draw.choice([1, 2, 3])
    config: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=n_kv_head * shared * draw.choice([4, 6, 8]),
        intermediate_size=draw.choice([20, 33, 56]),
        num_hidden_layers=n_layer,
        num_attention_heads=n_kv_head * shared,
        num_key_value_heads=n_kv_head,
        max_position_embeddings=128,
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        rope_parameters=draw.choice([rope for rope in ROPES if rope["rope_type"] != "dynamic"]),
        tie_word_embeddings=draw.choice([False, True]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "qwen3":
        config["head_dim"] = draw.choice([4, 10, 16])
    if family == "qwen3" and draw.choice([False, True]):
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([3, 6]))
        kinds = "full_attention", "sliding_attention"
        config["layer_types"] = [draw.choice(kinds) for _ in range(n_layer)]
    if family in EXPERTS:
        config |= EXPERTS[family] | dict(num_experts_per_tok=draw.choice([1, 2, 3]))
    if family == "deepseek_v3":
        config |= dict(num_key_value_heads=n_kv_head * shared, q_lora_rank=draw.choice([None, 9]))
        config["first_k_dense_replace"] = min(1, n_layer - 1)  # the last layer has experts
    made = AutoConfig.for_model(family, **config)
    made._attn_implementation = made._experts_implementation = "eager"
    model = HFModel.from_config(made).eval()
    enlarge_(model, seed)
    return model


def enlarged(model: Qwen2ForCausalLM, n_depth: int = 2, seed: int = 7) -> MTP:
    mtp = MTP(model, n_depth).eval()
    enlarge_(mtp, seed)
    return mtp


def taught(model: Qwen2ForCausalLM, n_depth: int, prompts: Any, steps: int = 12) -> MTP:
    """Layers that have learned a little of the model's own greedy text, so that their drafts are
    right now and then."""
    texts = complete(generate(model, prompts, 24, GREEDY))
    mtp = enlarged(model, n_depth).to(model.head_weight)
    optimizer = torch.optim.Adam(mtp.parameters(), lr=1e-2)
    for _ in range(steps):
        for prompt, text in zip(prompts, texts, strict=True):
            idx = torch.tensor([[*prompt, *text]])
            with torch.no_grad():
                h = model.model(idx)
            optimizer.zero_grad()
            torch.stack(mtp_losses(model, mtp, h, idx)).sum().backward()
            optimizer.step()
    return mtp.requires_grad_(False)


def of_transformers(twin: Any, mtp: MTP) -> Any:
    """Its layers, with the weights of ours. A window is listed there for each layer, or these see
    everything: of Mistral's, which is one number, its layers know nothing."""
    from transformers.modeling_layers import MtpModel

    config, n_depth = twin.config, len(mtp.layers)
    config.num_mtp_layers = n_depth
    if getattr(config, "layer_types", None) is not None:
        config.mtp_layer_types = [config.layer_types[-1]] * n_depth
    else:
        mtp.window = None
    made = MtpModel(twin, n_depth).eval()
    made.config._attn_implementation = "eager"
    found = made.load_state_dict(mtp.state_dict(), strict=False)
    assert not found.unexpected_keys
    assert not [name for name in found.missing_keys if name.startswith("layers.")]
    return made
