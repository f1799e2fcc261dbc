"""Layers for multi-token prediction with weights that show bugs, ours and those of transformers."""

from typing import Any

import model_families
import torch
from model_families import drawn
from tiny_models import ROPES, enlarge_

from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.models.mtp import MTP
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.training.mtp_loss import mtp_losses


def theirs(family: str, seed: int) -> Any:
    """A small random model of that family made by transformers: its last layer, which the others
    copy, has experts, and its rotation does not depend on the length of a text."""
    config, changes = drawn(family, seed), {}
    if config["rope_parameters"]["rope_type"] == "dynamic":
        changes["rope_parameters"] = ROPES[0]
    if family == "qwen3_moe":
        changes |= dict(decoder_sparse_step=1, mlp_only_layers=None)
    if family == "deepseek_v3":
        changes["first_k_dense_replace"] = min(1, config["num_hidden_layers"] - 1)
    return model_families.theirs(family, seed, **changes)


def enlarged(model: Qwen2ForCausalLM, n_depth: int = 2, seed: int = 7) -> MTP:
    mtp = MTP(model, n_depth).eval()
    enlarge_(mtp, seed)
    return mtp


def taught(model: Qwen2ForCausalLM, n_depth: int, prompts: Any, steps: int = 12) -> MTP:
    """Layers that have learned a little of the model's own greedy text, so that their drafts are
    right now and then."""
    texts = complete(generate(model, prompts, 24, GREEDY))
    mtp = enlarged(model, n_depth).to(model.head.weight)
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
