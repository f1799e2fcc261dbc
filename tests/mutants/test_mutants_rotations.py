"""Layers without positions, and heads of which a part turns."""

import pytest
from model_laws import laws_of
from mutation import Mutant, killer, laws_in, mutants

pytestmark = pytest.mark.slow

NOPE_LAWS = laws_of("smollm3") | laws_in("unit/models/test_positions.py", names="layer")

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
    "checkpoint.layer_kinds:some_rotate": [
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


PARTIAL_LAWS = laws_of("partial")

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
