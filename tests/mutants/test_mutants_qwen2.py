"""Mistakes that implementations of Qwen2 really had, and laws that find them.

Two of the historic list have no counterpart: a mask one column too wide that was cut to size later,
and a triangle that was drawn for one query too. Masks here are made from positions, in their exact
size.
"""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, mutants

LAWS = laws_of("qwen2") | laws_of("qwen2", "formula")
SOFTMAX = "\n    return torch.softmax(scores, dim=-1)"
HALVES = "torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)"

MISTAKES = {
    "attention.visibility:Visibility.rule": [
        ("a query does not see itself", "key <= query)", "key < query)"),
        ("triangle only, positions not compared",
         "(key <= query)", "torch.ones(query.shape[2], key.shape[3]).tril().bool()"),
        ("padding inverted", "key >= 0", "key < 0"),
        ("padding seen", "key >= 0", "key >= -1"),
    ],
    "attention.visibility:Visibility.is_causal": [
        ("is_causal with a cache", " and self.query_length == self.key_length", ""),
    ],
    "attention.attention:attention_weights": [
        ("-inf by multiplication",
         "scores.masked_fill(hidden, torch.finfo(work).min)", "scores + hidden * -torch.inf"),
        ("-inf by filling", f"torch.finfo(work).min){SOFTMAX}.masked_fill(hidden, 0.0)",
         f"-torch.inf){SOFTMAX}"),
        ("softmax over the queries", "softmax(scores, dim=-1)", "softmax(scores, dim=-2)"),
    ],
    "attention.sdpa:sdpa_attention": [
        ("no 1/sqrt(D)", "enable_gqa=Hkv != H", "enable_gqa=Hkv != H, scale=1.0"),
        ("1/sqrt(C)", "enable_gqa=Hkv != H", "enable_gqa=Hkv != H, scale=(H * D) ** -0.5"),
    ],
    "attention.gqa:repeat_kv": [
        ("key heads tiled", "repeat_interleave(n_head // x.shape[1], dim=1)",
         "repeat(1, n_head // x.shape[1], 1, 1)"),
    ],
    "cache.kv:KVCache.see": [
        ("positions restart after a cache", "start=self.dense_length or 0", "start=0"),
    ],
    "models.qwen2:Attention.forward": [
        ("keys turned by local positions", "self.rotate(k, *rotation)",
         "self.rotate(k, *RotaryEmbedding(self.head_dim, 1e6)(torch.arange(T)[None], x.dtype))"),
        ("rotation of queries alone", "self.rotate(k, *rotation)", "k"),
        ("heads split without transpose", "view(B, T, -1, self.head_dim).transpose(1, 2)",
         "view(B, -1, T, self.head_dim)"),
        ("heads merged without transpose", "y.transpose(1, 2).reshape", "y.reshape"),
    ],
    "layers.rope:apply_rope": [
        ("rotation backwards", HALVES,
         "torch.addcmul(a * cos, b, sin), torch.addcmul(b * cos, a, sin, value=-1)"),
        ("rotation of interleaved pairs",
         "_check_angles(x, cos, sin)", "return apply_rope_interleaved(x, cos, sin)"),
    ],
    "layers.norm:fast_rms_norm": [
        ("RMSNorm subtracts the mean", "F.rms_norm(x,", "F.rms_norm(x - x.mean(-1, True),"),
        ("RMSNorm sums", "F.rms_norm(x, weight.shape, weight, eps)",
         "x * torch.rsqrt(x.square().sum(-1, True) + eps) * weight"),
        ("eps outside the root", "F.rms_norm(x, weight.shape, weight, eps)",
         "x / (x.square().mean(-1, True).sqrt() + eps) * weight"),
    ],
    "layers.gated_mlp:GatedMLP.forward": [
        ("gate and up swapped",
         "self.gate_proj(x), self.up_proj(x)", "self.up_proj(x), self.gate_proj(x)"),
    ],
    "models.qwen2:Block.forward": [
        ("norm after the sum",
         "x + self.self_attn(self.input_layernorm(x), rotation, visibility, cache)",
         "self.input_layernorm(x + self.self_attn(x, rotation, visibility, cache))"),
    ],
    "models.qwen2:Qwen2Model.forward": [("no last norm", "return self.norm(x)", "return x")],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(MISTAKES))
def test_a_law_finds_the_mistake(mutant: Mutant) -> None:
    assert killer(mutant, LAWS)
