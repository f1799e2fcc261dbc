"""What the laws of the parts since Qwen2 share: how near, and the five laws of a whole model.

A law is a function that raises. Those of a whole model compare with transformers, on large weights:
a full pass, rows that are padded on the left, a text in pieces of 5, 1, 3, 3 tokens, documents that
are packed into a row, the gradients of a loss. What transformers finds is kept, so that a law asks
only for what our code finds now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from caches import in_chunks
from tiny_models import enlarge_, hf_twin, tiny_deepseek_v3, token_ids
from torch import Tensor

from lm_from_scratch.attention import sinks as sink_kinds
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.layers.gated_mlp import GatedMLP
from lm_from_scratch.models.deepseek_v3 import YaRNScaling
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import LINEAR, Qwen3NextConfig
from lm_from_scratch.models.sink_attention import SinkForCausalLM
from lm_from_scratch.models.smollm3 import SmolLM3Config
from lm_from_scratch.text import targets
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.training.loss import causal_lm_loss

Laws = dict[str, Callable[[], None]]
Rows = Sequence[tuple[str, str, Any]]  # what is wrong, where, and the code
Ideas = dict[str, tuple[Laws, Rows, Rows]]  # laws, right code written again, mistakes
DOUBLE = torch.float64


def near(found: Any, want: Any, atol: float = 2e-4) -> None:
    torch.testing.assert_close(found, want, atol=atol, rtol=0)


def exact(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, atol=1e-9, rtol=1e-9)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ------------------------------------------------------------------------------------- whole models

EPS = 0.05  # large, so that its place shows
BASE: dict[str, Any] = dict(
    vocab_size=97,
    block_size=128,
    n_embd=20,
    intermediate_size=28,
    rms_norm_eps=EPS,
    tie_word_embeddings=False,
    eos_token_id=2,
)
HEADS: dict[str, Any] = dict(n_head=6, n_kv_head=2, head_dim=8)
NEXT: dict[str, Any] = BASE | dict(
    n_head=6,
    n_kv_head=2,
    head_dim=16,
    n_layer=3,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=12,
    linear_value_head_dim=10,
    linear_conv_kernel_dim=3,
    mlp_only_layers=(0, 1, 2),
)
SINKS: dict[str, Any] = (
    BASE
    | HEADS
    | dict(
        n_layer=3,
        qkv_bias=True,
        sliding_window=4,
        layer_types=(FULL, SLIDING, FULL),
        rope_theta=1e4,
    )
)

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3Config(**BASE | HEADS, n_layer=3),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **BASE | HEADS,
        n_layer=3,
        n_expert=6,
        top_k=3,
        expert_size=8,
        norm_topk_prob=False,
        mlp_only_layers=(1,),
    ),
    "smollm3": lambda: SmolLM3Config(**BASE | HEADS, n_layer=5, pad_token_id=0, bos_token_id=1),
    "partial": lambda: Qwen3NextConfig(**NEXT, layer_types=(FULL,) * 3),
    "hybrid": lambda: Qwen3NextConfig(**NEXT, layer_types=(LINEAR, FULL, LINEAR)),
}


def made(name: str) -> Any:
    """The model of that name, as the code makes it now."""
    if name == "sinks":
        return SinkForCausalLM(Qwen2Config(**SINKS)).eval()
    if name == "deepseek_v3":
        yarn = YaRNScaling(factor=4.0, original_length=32, mscale=1.0, mscale_all_dim=1.0)
        return tiny_deepseek_v3(first_k_dense_replace=1, rms_norm_eps=EPS, rope_scaling=yarn)
    return build(CONFIGS[name]()).eval()


class Dense(GatedMLP):
    """A gated MLP in the place of gpt-oss's experts."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def twin_of(name: str, model: Any) -> Any:
    """The same model in transformers."""
    if name != "sinks":
        twin = hf_twin(model)
        twin.config._experts_implementation = "eager"
        return twin
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=97,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        hidden_size=20,
        intermediate_size=28,
        attention_bias=True,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        sliding_window=4,
        layer_types=list(SINKS["layer_types"]),
        num_local_experts=2,
        pad_token_id=0,
    )
    config._attn_implementation = "eager"
    twin = HFModel.from_config(config).eval()
    for layer in twin.model.layers:
        layer.mlp = Dense(20, 28)
    twin.load_state_dict(model.state_dict())
    return twin


ROWS = [token_ids(12, seed=1).tolist(), token_ids(7, seed=2).tolist()]
MASK = torch.tensor([[1] * 12, [0] * 5 + [1] * 7])


@cache
@torch.enable_grad()
def oracle(name: str) -> tuple[dict[str, Tensor], list[Tensor], dict[str, Tensor]]:
    """The weights, and what transformers finds: the logits of each row alone, the gradients of the
    loss of the padded batch."""
    model = made(name)
    enlarge_(model, seed=3)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):
            parameter.data.mul_(8)  # std 1
    for layer, (buffer_name, buffer) in enumerate(model.named_buffers()):
        if buffer_name.endswith("correction_bias"):
            buffer.copy_(0.3 * noise(len(buffer), seed=layer))
    twin, batch = twin_of(name, model), padded_batch(ROWS, 0, "left")
    with torch.no_grad():
        rows = [twin(torch.tensor([row]), use_cache=False).logits[0] for row in ROWS]
    twin(
        batch.idx,
        attention_mask=MASK,
        position_ids=batch.positions.clamp(min=0),
        use_cache=False,
        labels=batch.idx.masked_fill(batch.positions <= 0, targets.IGNORE),
    ).loss.backward()
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    return copy.deepcopy(model.state_dict()), rows, gradients


def built(name: str, formula: bool = False) -> Any:
    """The model with its weights, as the code is now."""
    model = made(name)
    model.load_state_dict(oracle(name)[0])
    for block in model.model.layers if formula else ():
        block.self_attn.compute = sink_kinds.SINK_KINDS["formula"]
    return model


@torch.no_grad()
def full(name: str, **how: bool) -> None:
    for row, want in zip(ROWS, oracle(name)[1], strict=True):
        near(built(name, **how)(torch.tensor([row]))[0], want)


@torch.no_grad()
def left(name: str, **how: bool) -> None:
    batch, want = padded_batch(ROWS, 0, "left"), oracle(name)[1]
    found = built(name, **how)(batch.idx, positions=batch.positions)
    near(found[0], want[0])
    near(found[1, 5:], want[1])


@torch.no_grad()
def chunked(name: str, **how: bool) -> None:
    """Padded on the left, too, so that rows have different lengths."""
    batch, want = padded_batch(ROWS, 0, "left"), oracle(name)[1]
    found = in_chunks(batch.idx, [5, 1, 3, 3], batch.positions, model=built(name, **how))
    near(found[0], want[0])
    near(found[1, 5:], want[1])
    found = in_chunks(torch.tensor(ROWS[:1]), [5, 1, 3, 3], model=built(name, **how))
    near(found[0], want[0])


@torch.no_grad()
def packed(name: str, **how: bool) -> None:
    found = built(name, **how)(
        torch.tensor([ROWS[1] + ROWS[0]]),
        positions=torch.tensor([[*range(7), *range(12)]]),
        documents=torch.tensor([[0] * 7 + [1] * 12]),
    )[0]
    near(found[:7], oracle(name)[1][1])
    near(found[7:], oracle(name)[1][0])


def gradients(name: str, **how: bool) -> None:
    model, batch = built(name, **how), padded_batch(ROWS, 0, "left")
    causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets).backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None, parameter
        near(p.grad, oracle(name)[2][parameter])


def whole(name: str, label: str = "", **how: bool) -> Laws:
    laws = (full, left, chunked, packed, gradients)
    return {f"{law.__name__}{label}": partial(law, name, **how) for law in laws}


def first(*given: Any) -> Any:
    return given[0]


def bare(self: Any, x: Tensor) -> Tensor:
    return x
