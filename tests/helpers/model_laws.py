"""Five laws of a model: it computes what ``transformers`` computes, on large weights.

A full pass, rows that are padded on the left, a text in pieces of 5, 1, 3, 3 tokens, documents that
are packed into a row, the gradients of a loss. A full pass alone sees no mistake of masks, caches
and positions. What transformers finds is kept: a law asks only for what our code finds now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from caches import in_chunks
from model_families import enlarge_biases_
from mutation import Law
from tiny_models import enlarge_, hf_twin, tiny_deepseek_v3, token_ids
from torch import Tensor

from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.layers.rope_scaling import LinearScaling, ProportionalScaling
from lm_from_scratch.models.deepseek_v3 import YaRNScaling
from lm_from_scratch.models.deepseek_v4 import HASHED, HEAVY, SCORED, SPARSE, DeepseekV4Config
from lm_from_scratch.models.gemma3 import Gemma3Config
from lm_from_scratch.models.gemma4 import Gemma4Config
from lm_from_scratch.models.gpt_oss import GptOssConfig
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.training.loss import causal_lm_loss


def near(actual: Any, expected: Any, atol: float = 2e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


EPS = 0.05  # large, so that its place shows
BASE: dict[str, Any] = dict(
    vocab_size=97, block_size=128, n_embd=20, intermediate_size=28, rms_norm_eps=EPS,
    tie_word_embeddings=False, eos_token_id=2, n_layer=3, n_head=6, n_kv_head=2, head_dim=8,
)  # fmt: skip
OSS: dict[str, Any] = BASE | dict(
    sliding_window=4, layer_types=(FULL, SLIDING, FULL), n_expert=6, top_k=3, swiglu_limit=0.5
)
GEMMA: dict[str, Any] = BASE | dict(
    n_embd=24, query_pre_attn_scalar=20, final_logit_softcapping=4.0, rope_theta=50.0,
    rope_local_theta=9.0, rope_scaling=LinearScaling(factor=4.0), sliding_window=4,
    layer_types=(FULL, SLIDING, FULL),
)  # fmt: skip
GEMMA4: dict[str, Any] = BASE | dict(
    n_embd=24, n_layer=6, layer_types=(SLIDING, FULL) * 3, sliding_window=4, global_head_dim=12,
    global_n_kv_head=3, keys_are_values=True, kv_shared_layers=2, per_layer_width=6,
    per_layer_vocab_size=97, final_logit_softcapping=4.0, rope_theta=50.0, rope_local_theta=9.0,
    rope_scaling=ProportionalScaling(partial_rotary_factor=0.5),
)  # fmt: skip
NEXT: dict[str, Any] = BASE | dict(
    head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12,
    linear_value_head_dim=10, linear_conv_kernel_dim=3, mlp_only_layers=(0, 1, 2),
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    n_expert=6, top_k=3, expert_size=8, norm_topk_prob=False, mlp_only_layers=(1,)
)
V4: dict[str, Any] = dict(
    vocab_size=97, block_size=128, n_layer=3, n_head=4, n_embd=20, head_dim=16, rms_norm_eps=EPS,
    partial_rotary_factor=0.5, q_lora_rank=10, o_groups=2, o_lora_rank=6, sliding_window=3,
    layer_types=(SPARSE, HEAVY, SPARSE), mlp_layer_types=(HASHED, SCORED, SCORED), sparse_rate=2,
    heavy_rate=3, index_n_heads=24, index_head_dim=10, index_topk=2, hc_mult=3, hc_eps=0.01,
    hc_sinkhorn_iters=3, n_expert=5, top_k=2, expert_size=6, eos_token_id=2,
)  # fmt: skip
YARN = dict(factor=4.0, original_length=32, mscale=1.0, mscale_all_dim=1.0)

NEW: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: build(Qwen2Config(**BASE | dict(n_layer=4))),
    "qwen3": lambda: build(Qwen3Config(**BASE)),
    "qwen3_moe": lambda: build(Qwen3MoeConfig(**BASE | EXPERTS)),
    "smollm3": lambda: build(
        SmolLM3Config(**BASE | dict(n_layer=5), pad_token_id=0, bos_token_id=1)
    ),
    "partial": lambda: build(Qwen3NextConfig(**NEXT, layer_types=(FULL,) * 3)),
    "hybrid": lambda: build(Qwen3NextConfig(**NEXT, layer_types=(LINEAR, FULL, LINEAR))),
    "gemma3": lambda: build(Gemma3Config(**GEMMA)),
    "gemma4": lambda: build(Gemma4Config(**GEMMA4)),
    "gpt_oss": lambda: build(GptOssConfig(**OSS)),
    "deepseek_v4": lambda: build(DeepseekV4Config(**V4)),
    "deepseek_v3": lambda: tiny_deepseek_v3(
        first_k_dense_replace=1, rms_norm_eps=EPS, rope_scaling=YaRNScaling(**YARN)
    ),
}


def twin_of(model: Any) -> Any:
    """The same model in transformers."""
    twin: Any = hf_twin(model)
    twin.config._experts_implementation = "eager"
    return twin


ROWS = [token_ids(12, seed=1).tolist(), token_ids(7, seed=2).tolist()]
BATCH = padded_batch(ROWS, 0, "left")


@cache
@torch.enable_grad()
def oracle(name: str) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """The weights, and what transformers finds: the logits of each row, the gradients of the loss
    of all."""
    model = NEW[name]()
    enlarge_(model, seed=3)
    for key, parameter in model.named_parameters():
        if key.endswith(("sinks", "hc.scale", "hc_scale")):
            parameter.data.mul_(8)  # std 1
    enlarge_biases_(model)
    twin = twin_of(model)
    logits, count = [], sum(len(row) - 1 for row in ROWS)
    for row in ROWS:  # each alone: DeepSeek-V4 would pool the padding
        idx = torch.tensor([row])
        out = twin(idx, labels=idx, use_cache=False)
        (out.loss * (len(row) - 1) / count).backward()
        logits.append(out.logits[0].detach())
    gradients = {key: p.grad for key, p in twin.named_parameters()}
    return copy.deepcopy(model.state_dict()), logits, gradients


def load(name: str, kind: str = "sdpa") -> Any:
    """The model with its weights, as the code is now."""
    model = NEW[name]().eval()
    model.load_state_dict(oracle(name)[0])
    if kind != "sdpa":
        use_attention_(model, kind)
    return model


@torch.no_grad()
def full(name: str, kind: str = "sdpa") -> None:
    for row, logits in zip(ROWS, oracle(name)[1], strict=True):
        near(load(name, kind)(torch.tensor([row]))[0], logits)


@torch.no_grad()
def left(name: str, kind: str = "sdpa") -> None:
    logits = load(name, kind)(BATCH.idx, positions=BATCH.positions)
    near([logits[0], logits[1, 5:]], oracle(name)[1])


@torch.no_grad()
def chunked(name: str, kind: str = "sdpa") -> None:
    """Padded on the left, too, so that rows have different lengths."""
    sizes = [5, 1, 3, 3]
    logits = in_chunks(BATCH.idx, sizes, BATCH.positions, model=load(name, kind))
    near([logits[0], logits[1, 5:]], oracle(name)[1])
    logits = in_chunks(torch.tensor(ROWS[:1]), sizes, model=load(name, kind))
    near(logits[0], oracle(name)[1][0])


@torch.no_grad()
def packed(name: str, kind: str = "sdpa") -> None:
    logits = load(name, kind)(
        torch.tensor([ROWS[0] + ROWS[1]]),
        positions=torch.tensor([[*range(12), *range(7)]]),
        documents=torch.tensor([[0] * 12 + [1] * 7]),
    )[0]
    near([logits[:12], logits[12:]], oracle(name)[1])


def gradients(name: str, kind: str = "sdpa") -> None:
    model = load(name, kind)
    causal_lm_loss(model(BATCH.idx, positions=BATCH.positions), BATCH.targets).backward()
    for key, parameter in model.named_parameters():
        near(parameter.grad, oracle(name)[2][key])  # both None for what only chooses


def laws_of(name: str, kind: str = "sdpa") -> dict[str, Law]:
    laws = (full, left, chunked, packed, gradients)
    return {f"{law.__name__}, {kind}": partial(law, name, kind) for law in laws}
