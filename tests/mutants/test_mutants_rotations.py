"""Layers without positions, and heads of which a part turns."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from model_laws import ROWS, exact, laws_of, load, near
from mutation import Mutant, killer, mutants
from tiny_models import enlarge_, ours_from_hf
from torch import Tensor


@torch.no_grad()
def moved(name: str) -> None:
    """A text at other places has the same logits: only distances count. In float64."""
    model, idx = load(name).double(), torch.tensor(ROWS[:1])
    positions = torch.arange(12)[None]
    exact(model(idx, positions=positions + 1000), model(idx, positions=positions))


@cache
def published() -> tuple[Any, Tensor]:
    """A SmolLM3 of transformers, whose file says layer by layer which rotate, and its logits."""
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model(
        "smollm3", vocab_size=97, hidden_size=24, intermediate_size=28, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, no_rope_layers=[1, 0, 0, 1],
    )  # fmt: skip
    twin = HFModel.from_config(config).eval()
    enlarge_(twin)
    return twin, twin(torch.tensor(ROWS[:1])).logits.detach()


@torch.no_grad()
def folder() -> None:
    near(ours_from_hf(published()[0])(torch.tensor(ROWS[:1])), published()[1])


NOPE_LAWS = laws_of("smollm3") | {"moved": partial(moved, "smollm3"), "folder": folder}

NOPE = {
    "layers.rope:unrotated": [
        ("all layers turn", "return x", "return apply_rope(x, cos, sin)"),
        ("queries turn, keys do not",
         "return x", "return apply_rope(x, cos, sin) if x.shape[1] == 6 else x"),
        ("keys turn, queries do not",
         "return x", "return apply_rope(x, cos, sin) if x.shape[1] == 2 else x"),
    ],
    "layers.rope:apply_rope": [("no layer turns", "_check_angles(x, cos, sin)", "return x")],
    "models.smollm3:all_but_every": [
        ("every fourth layer counted from 0", "(layer + 1) % interval", "layer % interval"),
        ("every fourth layer turns", "!= 0", "== 0"),
    ],
    "checkpoint.dialects:_some_rotate": [
        ("a 1 in no_rope_layers is one without",
         "tuple(listed[:n_layer])", "tuple(1 - n for n in listed[:n_layer])"),
    ],
    "layers.rope:rotation": [
        ("backwards", "angles.sin() * factor", "-angles.sin() * factor"),
        ("positions squared", "positions[..., None] *", "positions[..., None].square() *"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(NOPE))
def test_a_law_finds_the_mistake_in_layers_without_positions(mutant: Mutant) -> None:
    assert killer(mutant, NOPE_LAWS)


PARTIAL_LAWS = laws_of("partial") | {"moved": partial(moved, "partial")}

JOINED = "torch.cat([apply_rope(turned, cos, sin), rest], dim=-1)"
PAD, MORE = "nn.functional.pad", "(0, rest.shape[-1] // 2)"  # angles of what does not turn

PARTIAL = {
    "layers.rope:apply_partial_rope": [
        ("the last features turn", "turned, rest = x.tensor_split([2 * cos.shape[-1]]",
         "rest, turned = x.tensor_split([-2 * cos.shape[-1]]"),
        ("all features turn", JOINED,
         "apply_rope(x, cos.repeat_interleave(4, -1), sin.repeat_interleave(4, -1))"),
        ("no feature turns", "apply_rope(turned, cos, sin)", "turned"),
        ("pairs i and i + D / 2", JOINED,
         f"apply_rope(x, {PAD}(cos, {MORE}, value=1.0), {PAD}(sin, {MORE}))"),
        ("pairs 2i and 2i + 1", "apply_rope(turned", "apply_rope_interleaved(turned"),
        ("the rest is lost", "sin), rest]", "sin), 0 * rest]"),
    ],
    "layers.rope:base_frequencies": [("exponents over D, not R", "i2 / head_dim", "i2 / 16")],
    "layers.rope:rotation": [
        ("cosines in 16 bits", "return angles.cos() * factor, angles.sin() * factor",
         "return angles.cos().bfloat16().to(angles), angles.sin().bfloat16().to(angles)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("mutant", mutants(PARTIAL))
def test_a_law_finds_the_mistake_in_a_part(mutant: Mutant) -> None:
    assert killer(mutant, PARTIAL_LAWS)
