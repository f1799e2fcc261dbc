"""Qwen3-Next, three layers with a state for one with keys: against transformers, on tiny random
models of drawn sizes with large weights, and by laws in float64."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import in_chunks
from safetensors.torch import load_file
from tiny_models import ROPES, enlarge_, hf_twin, ours_from_hf, token_ids

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.cache.interface import NO_CACHE
from lm_from_scratch.cache.paged import BlockPool
from lm_from_scratch.cache.slots import StaticCache, cache_for
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.beam_search import beam_search
from lm_from_scratch.generation.engine import Engine
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.generation.speculative import ModelDrafter, PromptLookup, speculate
from lm_from_scratch.layers.activation import GatedMLP
from lm_from_scratch.layers.delta_rule import recurrent_delta_rule
from lm_from_scratch.layers.experts import GatedSharedExpert, SoftmaxRouter, active_parameters
from lm_from_scratch.layers.rope import apply_rope, rotation
from lm_from_scratch.models.blocks import blocks
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.gated_delta_net import GatedDeltaNet
from lm_from_scratch.models.qwen2 import FULL
from lm_from_scratch.models.qwen3_next import (
    LINEAR,
    SIZES,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    apply_partial_rope,
)
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

SIZE = dict(
    vocab_size=97, n_layer=4, n_head=4, n_kv_head=2, n_embd=28, head_dim=16, intermediate_size=40,
    linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=12,
    linear_value_head_dim=20, linear_conv_kernel_dim=3, eos_token_id=2, n_expert=6, top_k=2,
    expert_size=8, shared_expert_size=10, decoder_sparse_step=2,
)  # fmt: skip


def tiny(seed: int = 0, **changes: Any) -> Qwen3NextForCausalLM:
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZE | changes)).eval()
    enlarge_(model, seed)
    return model


def drawn(seed: int) -> dict[str, Any]:
    """A config in the words of transformers: no two sizes alike, by chance."""
    draw, experts = random.Random(f"qwen3_next {seed}"), random.Random(f"experts {seed}")
    n_kv_head, shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    keys, n_layer = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4])
    D, factor = draw.choice([(16, 0.25), (24, 0.25), (12, 0.5), (10, 1.0)])
    config: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=draw.choice([20, 24, 33]),
        intermediate_size=draw.choice([20, 33, 56]),
        num_hidden_layers=n_layer,
        num_attention_heads=n_kv_head * shared,
        num_key_value_heads=n_kv_head,
        head_dim=D,
        linear_num_key_heads=keys,
        linear_num_value_heads=keys * draw.choice([1, 2, 3]),
        linear_key_head_dim=draw.choice([8, 12, 16]),
        linear_value_head_dim=draw.choice([10, 16, 24]),
        linear_conv_kernel_dim=draw.choice([2, 3, 4]),
        max_position_embeddings=draw.choice([64, 128]),
        rms_norm_eps=draw.choice([1e-6, 1e-3, 1e-2]),
        rope_parameters=draw.choice(ROPES) | {"partial_rotary_factor": factor},
        tie_word_embeddings=draw.choice([False, True]),
        hidden_act=draw.choice(["silu", "silu", "gelu"]),
        num_experts=(n_expert := experts.choice([0, 2, 5, 12])),
        num_experts_per_tok=experts.randint(1, max(n_expert, 1)),
        norm_topk_prob=experts.choice([False, True]),
        moe_intermediate_size=experts.choice([5, 9, 12]),
        shared_expert_intermediate_size=experts.choice([6, 11]),
        decoder_sparse_step=experts.choice([1, 1, 2]),
        mlp_only_layers=experts.choice([None, [], [0], [n_layer - 1]]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if draw.choice([False, True]):
        config["layer_types"] = [draw.choice([FULL, LINEAR]) for _ in range(n_layer)]
    return config


class Double:
    """``torch``, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def in_float64(monkeypatch) -> None:
    """What transformers computes in float32 whatever the dtype of a model, in float64. A state that
    is nearly 0 is normalised, and so is its rounding: in float32 two correct ways of computing the
    same logits differ by 1e-3 now and then."""
    from transformers import modeling_rope_utils
    from transformers.models.qwen3_next import modeling_qwen3_next

    for module in (modeling_rope_utils, modeling_qwen3_next):
        monkeypatch.setattr(module, "torch", Double())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def theirs(seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model("qwen3_next", **drawn(seed) | changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one needs rows of whole 16 bytes
    model = HFModel.from_config(config).eval()
    enlarge_(model, seed)
    return model


def twin_of(model: Qwen3NextForCausalLM) -> Any:
    twin = hf_twin(model)
    twin.config._experts_implementation = "eager"
    return twin


def by_any_cache(model, idx, chunks, positions=None):
    """The logits of ``idx`` in pieces, through the smallest cache of the model."""
    cache, outputs, start = cache_for(model.config.windows), [], 0
    with torch.no_grad():
        for n in chunks:
            now = slice(start, start + n)
            place = None if positions is None else positions[:, now]
            outputs.append(model(idx[:, now], positions=place, cache=cache))
            start += n
    assert start == idx.shape[1]
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("seed", range(25))
def test_a_published_folder_computes_what_transformers_does(seed: int, in_float64) -> None:
    twin = theirs(seed)
    model, idx = ours_from_hf(twin).double(), token_ids(2, 12, seed=seed)
    assert type(model) is Qwen3NextForCausalLM
    want = twin.double()(idx, use_cache=False).logits
    torch.testing.assert_close(model(idx), want, atol=1e-9, rtol=0)
    with torch.no_grad():
        fed = in_chunks(idx, [5, 1, 4, 2], model=model)
    torch.testing.assert_close(fed, want, atol=1e-9, rtol=0)
    fed = by_any_cache(model, idx, [1, 6, 1, 1, 3])
    torch.testing.assert_close(fed, want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(25))
@torch.no_grad()
def test_in_float32_too_where_what_is_normalised_is_not_nearly_0(seed: int) -> None:
    """As near to float64 as transformers, whose own rounding is more than 5e-5 now and then."""
    idx = token_ids(2, 12, seed=seed)
    for n_expert in (0, drawn(seed)["num_experts"]):  # with experts results are larger
        twin = theirs(seed, rms_norm_eps=1e-2, num_experts=n_expert)
        want, model = twin(idx, use_cache=False).logits, ours_from_hf(twin)
        logits, exact = model(idx), model.double()(idx)
        atol = max(5e-5, 3 * (want - exact).abs().max().item())
        torch.testing.assert_close(logits.double(), exact, atol=atol, rtol=0)


@pytest.mark.parametrize("seed", range(25, 50))
def test_padded_rows_have_the_loss_and_gradients_of_transformers(seed: int, in_float64) -> None:
    twin = theirs(seed)
    model, twin = ours_from_hf(twin).double(), twin.double()
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    labels = batch.idx.masked_fill(batch.positions <= 0, IGNORE)
    want = twin(
        batch.idx,
        attention_mask=(batch.positions >= 0).long(),
        position_ids=batch.positions.clamp(min=0),
        labels=labels,
        use_cache=False,
    )
    want.loss.backward()
    loss = causal_lm_loss(model(batch.idx, positions=batch.positions), batch.targets)
    loss.backward()
    torch.testing.assert_close(loss, want.loss, atol=1e-6, rtol=0)  # summed in float32
    gradients = {name: p.grad for name, p in twin.named_parameters()}
    assert len(gradients) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=1e-6, rtol=1e-5, msg=name)
    with torch.no_grad():
        alone = model(torch.tensor([rows[1]]))[0]
    fed = by_any_cache(model, batch.idx, [4, 3, 1, 1], batch.positions)
    torch.testing.assert_close(fed[1, 4:], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("types", [(LINEAR, LINEAR, LINEAR, FULL), (LINEAR,) * 4, (FULL, LINEAR)])
@pytest.mark.parametrize("taps", [1, 2, 3, 6])
@torch.no_grad()
def test_documents_in_a_row_are_what_they_are_alone(types: tuple[str, ...], taps: int) -> None:
    """Documents shorter than the convolution too, with padding between them."""
    model = tiny(n_layer=len(types), layer_types=types, linear_conv_kernel_dim=taps).double()
    lengths, idx = [4, 1, 2, 70, 1], token_ids(2, 83)
    positions, documents, start = torch.full((2, 83), -1), torch.zeros(2, 83).long(), 1
    places = []
    for number, n in enumerate(lengths):
        places.append(slice(start, start + n))
        positions[:, places[-1]], documents[:, places[-1]] = torch.arange(n), number
        start += n + 1
    together = model(idx, positions=positions, documents=documents)
    for place in places:
        alone = model(idx[:, place])
        torch.testing.assert_close(together[:, place], alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_padding_anywhere_changes_no_state(seed: int) -> None:
    model = tiny(seed).double()
    idx = token_ids(3, 75, seed=seed)
    real = torch.rand(3, 75, generator=torch.Generator().manual_seed(seed)) < 0.7
    positions = torch.where(real, real.cumsum(1) - 1, -1)
    logits = model(idx, positions=positions)
    layer, x = model.model.layers[0].linear_attn, torch.randn(3, 75, 28).double()
    cache = cache_for([1])
    seen = cache.see(x, positions, windows=[1])[0]
    layer(x, seen, cache[0])
    for row in range(3):
        alone = model(idx[row, real[row]][None])[0]
        torch.testing.assert_close(logits[row, real[row]], alone, atol=1e-9, rtol=0)
        own = cache_for([1])
        layer(x[row, real[row]][None], own.see(x[row, real[row]][None], windows=[1])[0], own[0])
        for held, want in zip(cache.states[0], own.states[0], strict=True):
            torch.testing.assert_close(held[row], want[0], atol=1e-9, rtol=0)


def same_logits(theirs: torch.Tensor, ours: torch.Tensor) -> None:
    """Up to the rounding of float32, in which theirs computes its states, at the size they have."""
    top = float(theirs.detach().abs().max())
    torch.testing.assert_close(theirs, ours, atol=3e-5 * top, rtol=0)


@pytest.mark.parametrize("seed", range(50, 54))
def test_a_folder_comes_back_as_the_family_that_it_was(seed: int, tmp_path) -> None:
    model = ours_from_hf(theirs(seed, rms_norm_eps=1e-2))
    idx = token_ids(1, 12)
    twin = twin_of(model)
    assert type(twin).__name__ == "Qwen3NextForCausalLM"
    same_logits(twin(idx, use_cache=False).logits, model(idx))
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config
    assert torch.equal(again(idx), model(idx))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_made_here_is_read_by_transformers(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied, rms_norm_eps=1e-2)
    twin, idx = twin_of(model), token_ids(2, 12)
    same_logits(twin(idx, use_cache=False).logits, model(idx))


def test_the_drawn_configs_have_layers_of_both_kinds() -> None:
    models = [build(config_from_dict({"model_type": "qwen3_next", **drawn(s)})) for s in range(25)]
    mlps = [type(block.mlp) for model in models for block in model.model.layers]
    assert {*mlps} == {GatedMLP, GatedSharedExpert} and mlps.count(GatedSharedExpert) > 20
    routers = [m for model in models for m in model.modules() if isinstance(m, SoftmaxRouter)]
    assert {(m.normalize, m.top_k < len(m.weight)) for m in routers} == {
        (normalize, some) for normalize in (False, True) for some in (False, True)
    }


def test_fresh_weights_are_those_that_transformers_would_draw() -> None:
    torch.manual_seed(0)
    model = build(Qwen3NextConfig(**SIZE))
    layer = model.model.layers[0].linear_attn
    assert (model.model.norm.weight == 0).all() and (layer.norm.weight == 1).all()
    assert (layer.dt_bias == 1).all() and (layer.A_log.exp() <= 16).all()
    assert len(layer.A_log.unique()) == 6 and (layer.A_log.exp() >= 0.01).all()


@torch.no_grad()
def test_greedy_text_of_padded_prompts_is_that_of_transformers() -> None:
    twin = theirs(7, num_hidden_layers=4, layer_types=None, num_experts=0)
    model = ours_from_hf(twin)
    rows = [token_ids(8).tolist(), token_ids(3, seed=2).tolist()]
    batch = padded_batch(rows, 0, "left")
    mask = (batch.positions >= 0).long()
    want = twin.generate(
        batch.idx, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert complete(generate(model, rows, 9, GREEDY)) == want[:, 8:].tolist()
    chunked = generate(model, rows, 9, GREEDY, prefill_chunk=3, cache=StaticCache(4, 20))
    assert complete(chunked) == want[:, 8:].tolist()


@pytest.mark.parametrize("kind", ATTENTION_KINDS)
@torch.no_grad()
def test_every_kind_of_attention_in_the_layers_that_have_it(kind: str) -> None:
    model, idx = tiny(), token_ids(1, 9)
    want = model(idx)
    use_attention_(model, kind)
    torch.testing.assert_close(model(idx), want, atol=5e-5, rtol=0)


@torch.no_grad()
def test_beams_move_the_states_with_their_rows() -> None:
    """Every hypothesis has the score that the model gives it alone."""
    model, rows = tiny().double(), [token_ids(5).tolist(), token_ids(2, seed=3).tolist()]
    for row, hypotheses in zip(rows, beam_search(model, rows, 6, num_beams=3), strict=True):
        for hypothesis in hypotheses:
            text = torch.tensor([row + list(hypothesis.tokens)])
            scores = model(text).log_softmax(-1)[0, len(row) - 1 : -1]
            new = torch.tensor(hypothesis.tokens)[:, None]
            total = scores.gather(1, new).sum().item()
            assert abs(total - hypothesis.log_probability) < 1e-6


def test_what_would_take_tokens_back_is_refused_by_name() -> None:
    model, plain = tiny(), tiny(layer_types=(FULL,) * 4)
    refusal = r"is not supported for a Qwen3NextForCausalLM: layers \[0, 1, 2\] keep a state"
    with pytest.raises(ValueError, match=f"speculative decoding {refusal}"):
        speculate(model, PromptLookup(), [[5, 6]], 3)
    with pytest.raises(ValueError, match=f"drafting {refusal}"):
        speculate(plain, ModelDrafter(model), [[5, 6]], 3)
    with pytest.raises(ValueError, match=f"continuous batching over shared blocks {refusal}"):
        Engine(model, BlockPool(4, 2, 16, 8))


@torch.no_grad()
def test_positions_out_of_order_are_refused() -> None:
    model, idx = tiny(), token_ids(1, 4)
    with pytest.raises(ValueError, match=r"row 0 has position 1 after 2: a layer with a state"):
        model(idx, positions=torch.tensor([[0, 2, -1, 1]]))
    with pytest.raises(ValueError, match="row 0 has position 2 after 1"):
        model(
            idx,
            positions=torch.tensor([[0, 0, 1, 2]]),
            documents=torch.tensor([[0, 1, 1, 0]]),
        )


def test_partial_rotation_turns_the_first_features_and_passes_the_others() -> None:
    x = torch.randn(2, 3, 5, 12)
    cos, sin = rotation(torch.arange(5)[None], torch.tensor([1.0, 0.1]))
    y = apply_partial_rope(x, cos, sin)
    assert torch.equal(y[..., :4], apply_rope(x[..., :4], cos, sin))
    assert torch.equal(y[..., 4:], x[..., 4:])


@torch.no_grad()
def test_the_layer_alone_is_the_module_of_transformers_and_any_rule_can_be_put_in() -> None:
    twin = theirs(3, num_hidden_layers=1, layer_types=[LINEAR])
    theirs_, ours = twin.model.layers[0].linear_attn, ours_from_hf(twin).model.layers[0].linear_attn
    assert isinstance(ours, GatedDeltaNet)
    assert {*ours.state_dict()} == {*theirs_.state_dict()}
    x = torch.randn(2, 70, twin.config.hidden_size)
    seen = NO_CACHE.see(x)[0]
    torch.testing.assert_close(ours(x, seen, NO_CACHE), theirs_(x), atol=5e-5, rtol=0)
    ours.delta_rule = recurrent_delta_rule
    torch.testing.assert_close(ours(x, seen, NO_CACHE), theirs_(x), atol=5e-5, rtol=0)


def test_half_precision_keeps_its_memory_in_float32() -> None:
    model = tiny().to(torch.bfloat16)
    cache = cache_for(model.config.windows)
    with torch.no_grad():
        logits = model(token_ids(2, 9), cache=cache)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    inputs, memory = cache.states[0]
    assert inputs.dtype == torch.bfloat16 and memory.dtype == torch.float32


def test_the_blocks_of_a_model_with_states_alone_are_found() -> None:
    assert len(blocks(tiny(layer_types=(LINEAR,) * 4))) == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads=5 is not a multiple of linear_num"),
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor=0.2 of head_dim=16 is 3 features"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor=2.0 of head_dim=16 is 32 features"),
        (
            {"layer_types": (LINEAR,)},
            r"layer_types=\('linear_attention',\) must be a tuple of n_la",
        ),
        ({"layer_types": ("mamba",) * 4}, r"layer_types has \['mamba'\], not 'full_attention' or"),
        ({"sliding_window": 4}, "sliding_window=4 and max_window_layers=None are not supported"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Qwen3NextConfig(**SIZE | changes)
    with pytest.raises(ValueError, match="n_value_head=3 is no multiple of n_key_head=2"):
        GatedDeltaNet(8, 2, 3)


def test_what_files_may_say_otherwise_is_refused_by_name() -> None:
    file = {"model_type": "qwen3_next"}
    for key, value, reason in [
        ("attention_bias", True, "attention_bias=True is not supported, only attention_bias=False"),
        ("num_experts", 8, r"top_k=10 exceeds n_expert=8 \(num_experts_per_tok in the file\)"),
        ("num_experts", -1, r"n_expert=-1 must be .*\(num_experts in the file\)"),
        ("num_experts", False, r"n_expert=False must be .*\(num_experts in the file\)"),
        ("mlp_only_layers", 3, "mlp_only_layers=3 must be a list of layers"),
        ("mlp_only_layers", ["a"], r"mlp_only_layers=\('a',\) must be a tuple of layers"),
        ("decoder_sparse_step", 0, "decoder_sparse_step=0 must be an integer, at least 1"),
        (
            "shared_expert_intermediate_size",
            0,
            r"shared_expert_size=0 must .*\(shared_expert_intermediate_size in the file\)",
        ),
        ("layer_types", ["linear_attention"], "layer_types=.* must be a tuple of n_layer=48"),
        ("full_attention_interval", 0, "full_attention_interval=0 must be an integer, at least 1"),
    ]:
        with pytest.raises(ValueError, match=reason):
            config_from_dict(file | {key: value})
    some = config_from_dict(file | {"full_attention_interval": 3, "num_hidden_layers": 4})
    assert some.layer_types == (LINEAR, LINEAR, FULL, LINEAR)


def test_what_a_file_leaves_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    ours = config_from_dict({"model_type": "qwen3_next"})
    written = config_to_dict(ours)
    defaults = AutoConfig.for_model("qwen3_next")
    assert {"num_experts", "shared_expert_intermediate_size", "norm_topk_prob"} <= {*written}
    for key in {*written} & {*defaults.to_dict()} - {"architectures", "rope_scaling"}:
        assert getattr(defaults, key) == written[key], key


def test_layers_have_experts_where_the_file_says(tmp_path: Path) -> None:
    """Under their published names, each expert by itself; none at all where it counts none."""
    file = {"model_type": "qwen3_next", "num_hidden_layers": 6}
    sparse = config_from_dict(file | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [sparse.has_experts(n) for n in range(6)] == [n in (1, 5) for n in range(6)]
    dense = config_from_dict(file | {"num_experts": 0})
    assert not any(dense.has_experts(n) for n in range(6))
    assert config_from_dict(config_to_dict(dense)) == dense
    save_pretrained(tiny(), tmp_path / "m")
    shapes = {n: tuple(t.shape) for n, t in load_file(tmp_path / "m/model.safetensors").items()}
    want = {"gate.weight": (6, 28), "shared_expert_gate.weight": (1, 28)}
    for mlp, F in [*((f"experts.{e}", 8) for e in range(6)), ("shared_expert", 10)]:
        want |= {f"{mlp}.gate_proj.weight": (F, 28), f"{mlp}.up_proj.weight": (F, 28)}
        want |= {f"{mlp}.down_proj.weight": (28, F)}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp."
        found = {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
        assert (found == want) == (layer % 2 == 1) and ("gate_proj.weight" in found) != layer % 2


def test_the_published_size() -> None:
    """80 billion parameters, of which a token meets 3 and the embeddings, by its name."""
    with torch.device("meta"):
        model = build(Qwen3NextConfig(**SIZES["Qwen3-Next-80B-A3B"]))
    total, active = sum(p.numel() for p in model.parameters()), active_parameters(model)
    assert round(total / 1e9) == 80 and 3e9 < active < 4e9
    assert [n % 4 == 3 for n in range(48)] == [word == FULL for word in model.config.kinds]
    layer = model.model.layers[0].linear_attn
    assert layer.in_proj_qkvz.weight.shape == (12288, 2048) and layer.A_log.shape == (32,)
    assert layer.conv1d.weight.shape == (8192, 1, 4)
