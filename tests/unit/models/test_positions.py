"""Which features and which layers turn: SmolLM3, partial RoPE and a theta for each kind of layer,
each against whole models of transformers, on tiny random models of drawn sizes with large weights.

SmolLM3 is read from published folders. For the others transformers has models whose rest is ours: a
GLM-4.5 of dense layers is Qwen2 with partial RoPE, and a Mellum 2 of dense layers is Qwen3 with a
theta for each kind of layer. Their weights load by name.
"""

import random
from typing import Any

import pytest
import torch
from caches import in_chunks
from test_families import drawn as drawn_numbers
from tiny_models import ROPES, enlarge_, hf_twin, ours_from_hf, token_ids
from torch import Tensor, nn

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.cache.interface import NO_CACHE, Cache
from lm_from_scratch.cache.paged import BlockPool, PagedCache
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.rope_configs import scaling_from_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.kernels.model import use_kernels_
from lm_from_scratch.layers.embedding import embedded
from lm_from_scratch.layers.rope import (
    RotaryEmbedding,
    apply_partial_rope,
    apply_rope,
    unrotated,
)
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.qwen2 import FULL, SLIDING, Qwen2Config, Qwen2ForCausalLM
from lm_from_scratch.models.qwen3 import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from lm_from_scratch.models.smollm3 import SmolLM3Config, SmolLM3ForCausalLM
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

# The three families


class TwoThetasModel(Qwen3Model):
    """Qwen3 with a rotation for each kind of layer."""

    rotary_embs: dict[str, RotaryEmbedding]

    def forward(
        self,
        idx: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        x = embedded(idx, self.embed_tokens)
        seen = cache.see(x, positions, documents, self.config.windows)
        rotations = {
            kind: rotary(seen[0].query_positions, x.dtype)
            for kind, rotary in self.rotary_embs.items()
        }
        for layer, block in enumerate(self.layers):
            kind = self.config.layer_types[layer]
            x = block(x, rotations[kind], seen[layer], cache[layer])
        return self.norm(x)


class TwoThetas(Qwen3ForCausalLM):
    backbone_class = TwoThetasModel


def drawn(family: str, seed: int) -> dict[str, Any]:
    """A config in the words of transformers, whose heads are wide enough for a part to be pairs."""
    draw = random.Random(f"positions {family} {seed}")
    config = drawn_numbers("qwen3" if family == "mellum" else "llama", seed)
    config |= dict(num_hidden_layers=draw.choice([2, 3, 4]), head_dim=draw.choice([16, 24]))
    n_layer = config["num_hidden_layers"]
    if family == "smollm3":
        if draw.choice([False, True]):
            config["no_rope_layers"] = [draw.choice([0, 1]) for _ in range(n_layer)]
        else:
            config["no_rope_layer_interval"] = draw.choice([1, 2, 3, 4])
    if family == "glm4_moe":
        config |= dict(first_k_dense_replace=n_layer, attention_bias=True, num_mtp_layers=0)
        factor = draw.choice([0.25, 0.5, 0.75, 1.0])
        config["rope_parameters"] = config["rope_parameters"] | {"partial_rotary_factor": factor}
    if family == "mellum":
        kinds = [FULL, SLIDING]
        del config["rope_parameters"]
        config.pop("use_sliding_window", None)
        config |= dict(
            layer_types=draw.sample(kinds * n_layer, n_layer),
            mlp_layer_types=["dense"] * n_layer,
            sliding_window=draw.choice([3, 6]),
            rope_parameters={
                kind: {"rope_type": "default", "rope_theta": theta}
                for kind, theta in zip(kinds, draw.choice([(1e6, 1e4), (5e5, 100.0), (50.0, 1e6)]))
            },
        )
    return config


def theirs(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model(family, **drawn(family, seed) | changes)
    config._attn_implementation = "eager"
    model = HFModel.from_config(config).eval()
    enlarge_(model, seed)
    return model


def with_partial_rope_(model: Qwen2ForCausalLM, factor: float) -> Qwen2ForCausalLM:
    """The first int(factor * D) features of each head turn."""
    rotary = model.model.rotary_emb
    width = int(model.config.head_dim * factor)
    model.model.rotary_emb = RotaryEmbedding(width, rotary.theta, rotary.scaling)
    for block in model.model.layers:
        block.self_attn.rotate = apply_partial_rope
    return model


def numbers(c: Any) -> dict[str, Any]:
    """The numbers of a config of transformers that do not concern positions, in our words."""
    return dict(
        vocab_size=c.vocab_size,
        block_size=c.max_position_embeddings,
        n_layer=c.num_hidden_layers,
        n_head=c.num_attention_heads,
        n_kv_head=c.num_key_value_heads,
        n_embd=c.hidden_size,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        activation=c.hidden_act,
        rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=c.tie_word_embeddings,
        eos_token_id=2,
    )


def ours(twin: nn.Module) -> Qwen2ForCausalLM:
    """The same model of this package, with its weights."""
    c: Any = twin.config
    if c.model_type == "smollm3":
        return ours_from_hf(twin)
    if c.model_type == "glm4_moe":
        rope = dict(c.rope_parameters)
        factor = rope.pop("partial_rotary_factor")
        theta, scaling = scaling_from_dict(rope, c.max_position_embeddings)
        config = Qwen2Config(**numbers(c), rope_theta=theta, rope_scaling=scaling)
        model = with_partial_rope_(Qwen2ForCausalLM(config), factor)
    else:
        slides = dict(sliding_window=c.sliding_window, layer_types=tuple(c.layer_types))
        model = TwoThetas(Qwen3Config(**numbers(c), **slides))
        model.model.rotary_embs = {
            kind: RotaryEmbedding(c.head_dim, rope["rope_theta"])
            for kind, rope in c.rope_parameters.items()
        }
    weights = dict(twin.state_dict())
    if c.tie_word_embeddings:
        del weights["lm_head.weight"]
    model.load_state_dict(weights)
    return model.eval()


FAMILIES = ["smollm3", "glm4_moe", "mellum"]


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_whole_and_in_chunks(family: str, seed: int) -> None:
    twin = theirs(family, seed)
    model = ours(twin)
    idx = token_ids(2, 12, seed=seed)
    want = twin(idx, labels=idx)
    torch.testing.assert_close(model(idx), want.logits, atol=5e-5, rtol=0)
    fed = in_chunks(idx, [5, 1, 4, 2], model=model)
    torch.testing.assert_close(fed, want.logits, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(25, 50))
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_have_the_loss_and_gradients_of_transformers(family: str, seed: int) -> None:
    twin = theirs(family, seed)
    model = ours(twin)
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    want = twin(
        batch.idx,
        attention_mask=(batch.positions >= 0).long(),
        position_ids=batch.positions.clamp(min=0),
        labels=batch.idx.masked_fill(batch.positions <= 0, IGNORE),
    )
    want.loss.backward()
    loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
    loss.backward()
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=0)
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-4, msg=name)
    with torch.no_grad():
        alone = model(torch.tensor([rows[1]]))[0]
        fed = in_chunks(batch.idx, [4, 3, 1, 1], batch.positions, model=model)
        packed = model(
            torch.tensor([rows[0] + rows[1]]),
            positions=torch.tensor([[*range(9), *range(5)]]),
            documents=torch.tensor([[0] * 9 + [1] * 5]),
        )
    torch.testing.assert_close(fed[1, 4:], alone, atol=5e-5, rtol=0)
    torch.testing.assert_close(packed[0, 9:], alone, atol=5e-5, rtol=0)


@pytest.mark.parametrize("kind", ["growing", "static", "by window", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_kind_of_cache_in_float64(family: str, kind: str) -> None:
    model = ours(theirs(family, 1)).double()
    c = model.config
    cache: Cache = {
        "growing": lambda: GrowingCache(c.n_layer),
        "static": lambda: StaticCache(c.n_layer, 20),
        "by window": lambda: cache_for(c.windows, slack=4),
        "paged": lambda: PagedCache(
            BlockPool(c.n_layer, c.n_kv_head, c.head_dim, 40, 4, torch.float64)
        ),
    }[kind]()
    idx = token_ids(2, 14)
    fed = torch.cat([model(part, cache=cache) for part in idx.split([5, 1, 4, 3, 1], 1)], 1)
    torch.testing.assert_close(fed, model(idx), atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_only_distances_matter_whatever_turns(family: str) -> None:
    """A text moved by 1000 places has the same logits, in float64."""
    model = ours(theirs(family, 3, **(PLAIN_ROPE if family != "mellum" else {}))).double()
    idx, positions = token_ids(2, 12), torch.arange(12).expand(2, -1)
    here, there = model(idx, positions=positions), model(idx, positions=positions + 1000)
    torch.testing.assert_close(there, here, atol=1e-9, rtol=0)


PLAIN_ROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_kind_of_attention_and_greedy_text(family: str, kind: str) -> None:
    twin = theirs(family, 7)
    model = ours(twin)
    use_attention_(model, kind)
    idx = token_ids(1, 6)
    torch.testing.assert_close(model(idx), twin(idx).logits, atol=5e-5, rtol=0)
    want = twin.generate(idx, max_new_tokens=9, do_sample=False, eos_token_id=None)
    cache = GrowingCache(model.config.n_layer)  # which keeps keys in order, as `packed` needs them
    assert complete(generate(model, idx, 9, GREEDY, cache=cache)) == want[:, 6:].tolist()


# SmolLM3

SMOLLM3 = dict(
    vocab_size=97, n_layer=4, n_head=6, n_kv_head=2, n_embd=24, intermediate_size=28,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(50, 56))
def test_a_folder_comes_back_as_the_family_that_it_was(seed: int, tmp_path) -> None:
    model = ours_from_hf(theirs("smollm3", seed))
    assert type(model) is SmolLM3ForCausalLM
    idx = token_ids(1, 12)
    twin = hf_twin(model)
    assert type(twin).__name__ == "SmolLM3ForCausalLM"
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again(idx), model(idx))


@pytest.mark.parametrize("rope_layers", [None, (0, 1, 1, 0), (1, 1, 1, 1), (0, 0, 0, 0)])
def test_a_model_made_here_is_read_by_transformers(rope_layers: tuple[int, ...] | None) -> None:
    model = build(SmolLM3Config(**SMOLLM3, rope_layers=rope_layers)).eval()
    enlarge_(model)
    twin, idx = hf_twin(model), token_ids(2, 9)
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    assert twin.config.no_rope_layers == list(rope_layers or (1, 1, 1, 0))


def test_a_1_is_a_layer_that_rotates() -> None:
    """In the file the list is called no_rope_layers all the same."""
    config = config_from_dict(
        {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1, 1]}
    )
    assert config.rope_layers == (1, 1, 0, 1)
    rotate = [block.self_attn.rotate for block in build(SmolLM3Config(**SMOLLM3)).model.layers]
    assert rotate == [apply_rope, apply_rope, apply_rope, unrotated]
    assert config_to_dict(config)["no_rope_layers"] == [1, 1, 0, 1]


@torch.no_grad()
def test_a_layer_without_rotation_hands_its_cache_the_bare_projection() -> None:
    """Keys of a layer that rotates are turned before they are kept, those of another never."""
    model = build(SmolLM3Config(**SMOLLM3, rope_layers=(0, 1, 1, 1))).eval()
    enlarge_(model)
    for layer in (0, 1):
        bare, cache = [], GrowingCache(4)
        attention = model.model.layers[layer].self_attn
        attention.k_proj.register_forward_hook(lambda *a, kept=bare: kept.append(a[2]))
        model(token_ids(1, 7), cache=cache)
        bare = bare[0].view(1, 7, 2, 4).transpose(1, 2)
        same = torch.allclose(cache.contents(layer)[0], bare, atol=1e-5)
        assert same == (layer == 0)


@torch.no_grad()
def test_a_model_of_such_layers_alone_takes_no_notice_of_positions() -> None:
    model = build(SmolLM3Config(**SMOLLM3, rope_layers=(0, 0, 0, 0))).eval().double()
    enlarge_(model)
    idx = token_ids(2, 9)
    apart = torch.arange(9).expand(2, -1) * 7
    assert torch.equal(model(idx, positions=apart), model(idx, positions=apart // 7))
    # one layer takes a mean over a set: without the mask's help it knows no order
    first = build(SmolLM3Config(**SMOLLM3 | {"n_layer": 1}, rope_layers=(0,))).eval().double()
    enlarge_(first)
    mixed = idx[:, [3, 0, 5, 2, 1, 4, 7, 6, 8]]
    torch.testing.assert_close(first(mixed)[:, -1], first(idx)[:, -1], atol=1e-12, rtol=0)
    assert (model(mixed)[:, -1] - model(idx)[:, -1]).abs().max() > 0.1


def test_kernels_leave_layers_alone_that_do_not_turn_all_features(monkeypatch) -> None:
    from lm_from_scratch.kernels import model as kernels

    monkeypatch.setattr(kernels, "check_device", lambda *a, **k: None)
    model = build(SmolLM3Config(**SMOLLM3))
    assert use_kernels_(model, ["rope"]) == {"rope": 3}
    rotate = [block.self_attn.rotate for block in model.model.layers]
    assert rotate == [kernels.apply_rope] * 3 + [unrotated]
    partial = with_partial_rope_(build(Qwen2Config(**{**SMOLLM3, "n_layer": 2})), 0.5)
    with pytest.raises(ValueError, match=r"has nothing that .*rope.* could replace"):
        use_kernels_(partial, ["rope"])


def test_the_published_size_has_its_parameters() -> None:
    with torch.device("meta"):
        model = build(SmolLM3Config())
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == 3.08
    assert sum(model.config.rope_layers) == 27


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_layers": (1, 0)}, r"rope_layers=(1, 0) must be a tuple of n_layer=4"),
        ({"rope_layers": [1, 1, 1, 0]}, "rope_layers=[1, 1, 1, 0] must be a tuple"),
        ({"rope_layers": (1, 1, 2, 0)}, "rope_layers=(1, 1, 2, 0) must be 1 (rotates) or 0"),
        ({"rope_layers": (1, 1, True, 0)}, "must be 1 (rotates) or 0 (does not)"),
    ],
)
def test_bad_layers_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        SmolLM3Config(**SMOLLM3 | change)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0] must have a number for each of"),
        ({"no_rope_layers": "1110"}, "no_rope_layers='1110' must have a number"),
        ({"no_rope_layers": [1] * 35 + ["x"]}, "must be 1 (rotates) or 0"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be an integer, at least 1"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None must be an integer"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported, only mlp_bias=False"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 must be"),
        ({"rope_parameters": {FULL: {"rope_theta": 1e4}}}, "['full_attention'] is a dictionary"),
    ],
)
def test_what_a_file_cannot_say_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        config_from_dict({"model_type": "smollm3", **change})
    assert message in str(error.value)


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    config = config_from_dict({"model_type": "smollm3"})
    written, defaults = config_to_dict(config), AutoConfig.for_model("smollm3")
    skip = {"architectures", "rope_parameters", "rope_scaling", "max_window_layers"}
    compared = {*written} & {*defaults.to_dict()} - skip
    assert "no_rope_layers" in compared
    assert {key: getattr(defaults, key) for key in compared} == {
        key: written[key] for key in compared
    }
    assert config.rope_theta == defaults.rope_parameters["rope_theta"] == 2e6


# The modules alone


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
def test_partial_rope_equals_the_module_of_glm(factor: float, rope: dict[str, Any]) -> None:
    from transformers.models.glm4_moe import modeling_glm4_moe as glm

    D, parameters = 16, {**rope, "partial_rotary_factor": factor}
    config = glm.Glm4MoeConfig(head_dim=D, max_position_embeddings=64, rope_parameters=parameters)
    positions = torch.arange(40)[None] + torch.tensor([[0], [20]])
    q, k = torch.randn(2, 4, 40, D), torch.randn(2, 2, 40, D)
    if rope["rope_type"] == "dynamic":
        positions = positions[:1].expand(2, -1)  # its base is that of the longest row
    want = glm.apply_rotary_pos_emb(q, k, *glm.Glm4MoeRotaryEmbedding(config)(q, positions))
    theta, scaling = scaling_from_dict(rope, 64)
    turn = RotaryEmbedding(int(D * factor), theta, scaling)(positions, q.dtype)
    for x, expected in zip((q, k), want):
        torch.testing.assert_close(apply_partial_rope(x, *turn), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_features_after_the_turned_ones_pass_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 5, 12, dtype=dtype)
    turn = RotaryEmbedding(8, 1e4)(torch.arange(5)[None] + 3, dtype)
    y = apply_partial_rope(x, *turn)
    assert y.dtype == dtype and y.is_contiguous()
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert torch.equal(y[..., :8], apply_rope(x[..., :8], *turn))
    assert torch.equal(apply_partial_rope(x[..., :8], *turn), apply_rope(x[..., :8], *turn))
    assert unrotated(x, *turn) is x
    with pytest.raises(ValueError, match="x has D=6 features, so cos and sin must have half"):
        apply_partial_rope(x[..., :6], *turn)


@pytest.mark.parametrize("model_type", ["gemma3_text", "olmo3", "mellum"])
def test_two_thetas_equal_the_module_of_gemma(model_type: str) -> None:
    from transformers import AutoConfig
    from transformers.models.gemma3 import modeling_gemma3 as gemma

    config = AutoConfig.for_model(model_type, head_dim=16)
    positions = torch.tensor([[0, 1, 2, 900], [-1, 40, 7, 131_071]])
    rotary = gemma.Gemma3RotaryEmbedding.__new__(gemma.Gemma3RotaryEmbedding)
    config.layer_types = [FULL, SLIDING]
    rotary.__init__(config)
    x = torch.randn(2, 3, 4, 16)
    thetas = {kind: config.rope_parameters[kind]["rope_theta"] for kind in (FULL, SLIDING)}
    if model_type == "gemma3_text":
        assert thetas == {FULL: 1e6, SLIDING: 1e4}
    for kind, theta in thetas.items():
        cos, sin = rotary(x, positions, kind)
        want, _ = gemma.apply_rotary_pos_emb(x, x, cos, sin)
        turn = RotaryEmbedding(16, theta)(positions, x.dtype)
        torch.testing.assert_close(apply_rope(x, *turn), want, atol=2e-4, rtol=0)
