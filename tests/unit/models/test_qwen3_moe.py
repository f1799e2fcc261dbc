"""Qwen3 with experts against transformers, on tiny random models of drawn sizes with large
weights; its folders both ways."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from caches import in_chunks
from safetensors.torch import load_file, save_file
from tiny_models import ROPES, enlarge_, hf_twin, ours_from_hf, token_ids

from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.generation.generate import complete, generate
from lm_from_scratch.generation.sampling import GREEDY
from lm_from_scratch.layers.experts import active_parameters
from lm_from_scratch.models.causal_lm import build
from lm_from_scratch.models.qwen3_moe import SIZES, Qwen3MoeConfig, Qwen3MoeForCausalLM
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.balance import balancing_loss, record_routing
from lm_from_scratch.training.loss import causal_lm_loss
from lm_from_scratch.weights.lora import adapters, add_lora_, merge_lora_
from lm_from_scratch.weights.quantize import quantize_, quantized_weights

TINY: dict[str, Any] = dict(
    vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, n_embd=20, head_dim=6, intermediate_size=28,
    n_expert=6, top_k=2, expert_size=8, eos_token_id=2,
)  # fmt: skip


def tiny(seed: int = 0, **changes: Any) -> Qwen3MoeForCausalLM:
    model = build(Qwen3MoeConfig(**TINY | changes)).eval()
    enlarge_(model, seed)
    return model


def drawn(seed: int) -> dict[str, Any]:
    """A config in the words of transformers: no two sizes alike, by chance."""
    draw = random.Random(seed)
    n_kv_head, shared, n_layer = (draw.choice([1, 2, 3]) for _ in range(3))
    n_expert = draw.choice([2, 5, 12])
    config: dict[str, Any] = dict(
        vocab_size=97,
        hidden_size=n_kv_head * shared * draw.choice([4, 6, 8]),
        intermediate_size=draw.choice([20, 33, 56]),
        moe_intermediate_size=draw.choice([5, 9, 12]),
        num_hidden_layers=n_layer,
        num_attention_heads=n_kv_head * shared,
        num_key_value_heads=n_kv_head,
        num_experts=n_expert,
        num_experts_per_tok=draw.randint(1, n_expert),
        norm_topk_prob=draw.choice([False, True]),
        decoder_sparse_step=draw.choice([1, 1, 2]),
        mlp_only_layers=draw.choice([None, [], [0], [n_layer - 1]]),
        max_position_embeddings=draw.choice([64, 128]),
        rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
        rope_parameters=draw.choice(ROPES),
        tie_word_embeddings=draw.choice([False, True]),
        hidden_act=draw.choice(["silu", "silu", "gelu"]),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if draw.choice([False, True]):
        config["head_dim"] = draw.choice([4, 10, 16])
    if draw.choice([False, False, True]):
        config |= dict(use_sliding_window=True, sliding_window=draw.choice([3, 6]))
    return config


def theirs(seed: int = 0, **changes: Any) -> Any:
    from transformers import AutoConfig
    from transformers import AutoModelForCausalLM as HFModel

    config = AutoConfig.for_model("qwen3_moe", **drawn(seed) | changes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the grouped one needs rows of whole 16 bytes
    model = HFModel.from_config(config).eval()
    enlarge_(model, seed)
    return model


@pytest.mark.parametrize("seed", range(25))
def test_a_published_folder_computes_what_transformers_does(seed: int) -> None:
    twin = theirs(seed)
    model = ours_from_hf(twin)
    assert type(model) is Qwen3MoeForCausalLM
    idx = token_ids(2, 12, seed=seed)
    want = twin(idx)
    torch.testing.assert_close(model(idx), want.logits, atol=5e-5, rtol=0)
    with torch.no_grad():
        fed = in_chunks(idx, [5, 1, 4, 2], model=model)
    torch.testing.assert_close(fed, want.logits, atol=5e-5, rtol=0)


@pytest.mark.parametrize("seed", range(25, 50))
def test_padded_rows_have_the_loss_and_gradients_of_transformers(seed: int) -> None:
    """With the auxiliary loss, in which no padding counts."""
    twin = theirs(seed)
    model = ours_from_hf(twin)
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    real = batch.positions >= 0
    sparse = any(model.config.has_experts(layer) for layer in range(model.config.n_layer))
    want = twin(
        batch.idx,
        attention_mask=real.long(),
        position_ids=batch.positions.clamp(min=0),
        labels=batch.idx.masked_fill(batch.positions <= 0, IGNORE),
        output_router_logits=sparse,
    )
    want.loss.backward()
    if sparse:
        with record_routing(model) as routings:
            logits = model(batch.idx, positions=batch.positions)
        loss = causal_lm_loss(logits, batch.targets)
        balance = balancing_loss([layer[0] for layer in routings], real)
        torch.testing.assert_close(balance, want.aux_loss, atol=1e-5, rtol=1e-5)
        loss = loss + twin.config.router_aux_loss_coef * balance
    else:
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


@pytest.mark.parametrize("seed", range(50, 56))
def test_a_folder_comes_back_as_it_was(seed: int, tmp_path: Path) -> None:
    model = ours_from_hf(theirs(seed))
    idx = token_ids(1, 12)
    twin = hf_twin(model)
    twin.config._experts_implementation = "eager"
    assert type(twin).__name__ == "Qwen3MoeForCausalLM"
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config and torch.equal(again(idx), model(idx))


def test_a_model_made_here_is_read_by_transformers() -> None:
    model = tiny(mlp_only_layers=(1,), decoder_sparse_step=1)
    idx = token_ids(2, 9)
    twin = hf_twin(model)
    torch.testing.assert_close(twin(idx).logits, model(idx), atol=5e-5, rtol=0)
    want = twin.generate(idx[:1, :6], max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert complete(generate(model, idx[:1, :6], 9, GREEDY)) == want[:, 6:].tolist()


def test_layers_have_experts_where_the_config_says() -> None:
    config = Qwen3MoeConfig(**TINY | {"n_layer": 6}, decoder_sparse_step=2, mlp_only_layers=(3,))
    names = {name for name, _ in build(config).named_parameters() if name.endswith("gate.weight")}
    assert names == {f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 5)}


def test_files_hold_each_expert_by_itself(tmp_path: Path) -> None:
    """Also in shards smaller than the stacked tensors would be; and the stacked form is read."""
    model, idx = tiny(), token_ids(1, 7)
    save_pretrained(model, tmp_path / "m", max_shard_bytes=8_000)
    shards = sorted((tmp_path / "m").glob("model-*.safetensors"))
    tensors = {name: t for shard in shards for name, t in load_file(shard).items()}
    layer = "model.layers.1.mlp.experts"
    stacked = model.model.layers[1].mlp.experts
    assert len(shards) > 3 and f"{layer}.gate_up_proj" not in tensors
    assert torch.equal(tensors[f"{layer}.5.up_proj.weight"], stacked.gate_up_proj[5, 8:])
    assert torch.equal(tensors[f"{layer}.5.gate_proj.weight"], stacked.gate_up_proj[5, :8])
    assert torch.equal(tensors[f"{layer}.5.down_proj.weight"], stacked.down_proj[5])
    assert torch.equal(from_pretrained(tmp_path / "m")(idx), model(idx))
    for shard in [*shards, tmp_path / "m" / "model.safetensors.index.json"]:
        shard.unlink()
    save_file({n: t.contiguous() for n, t in model.state_dict().items()},
              tmp_path / "m" / "model.safetensors")  # fmt: skip
    again = from_pretrained(tmp_path / "m").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("expert", "change", "message"),
    [
        ("2.up_proj", None, r"layers\.1\.mlp\.experts\.2\.up_proj\.weight is missing"),
        (
            "3.up_proj",
            torch.zeros(7, 20),
            r"experts\.3\.up_proj\.weight is torch.float32 \(7, 20\)",
        ),
        ("3.down_proj", torch.zeros(20, 8).half(), "read as the dtype that config.json names"),
        ("99999999.up_proj", torch.zeros(8, 20), r"experts\.6\.gate_proj\.weight is missing"),
        ("6", torch.zeros(8, 20), r"experts\.6\.down_proj\.weight is missing"),
    ],
)
def test_damaged_experts_are_refused(expert, change, message, tmp_path: Path) -> None:
    save_pretrained(tiny(), tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    name = f"model.layers.1.mlp.experts.{expert}"
    if change is None:
        del tensors[f"{name}.weight"]
    elif expert == "6":
        tensors |= {f"{name}.{m}.weight": change.clone() for m in ("gate_proj", "up_proj")}
    else:
        tensors[f"{name}.weight"] = change
    save_file(tensors, path)
    if change is not None and change.dtype == torch.float16:
        again = from_pretrained(tmp_path / "m")
        assert {p.dtype for p in again.parameters()} == {torch.float32}
        return
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "m")


@torch.no_grad()
def test_quantised_and_adapted_models_keep_their_experts(tmp_path: Path) -> None:
    """Both change linear maps alone, so the stacked experts stay what they are."""
    idx = token_ids(1, 7)
    model = tiny(n_embd=64, head_dim=32)
    experts = model.model.layers[0].mlp.experts.gate_up_proj.clone()
    quantize_(model, 8)
    found = quantized_weights(model)
    assert found and not any("experts" in name or ".gate." in name for name in found)
    save_pretrained(model, tmp_path / "int8")
    again = from_pretrained(tmp_path / "int8")
    assert torch.equal(again(idx), model(idx))
    assert torch.equal(again.model.layers[0].mlp.experts.gate_up_proj, experts)
    model = tiny()
    before = model(idx)
    add_lora_(model, rank=2)
    assert all("self_attn" in name for name in adapters(model))
    assert torch.equal(model(idx), before)
    merge_lora_(model)
    torch.testing.assert_close(model(idx), before)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_their_parameters(name: str) -> None:
    """Both numbers are in the name."""
    with torch.device("meta"):
        model = build(Qwen3MoeConfig(**SIZES[name]))
    total, active = (f"{round(n / 1e9)}" for n in (
        sum(p.numel() for p in model.parameters()), active_parameters(model)
    ))  # fmt: skip
    assert {"Qwen3-30B-A3B": ("31", "3"), "Qwen3-235B-A22B": ("235", "22")}[name] == (total, active)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(top_k=7), r"top_k=7 exceeds n_expert=6"),
        (dict(n_expert=0), r"n_expert=0 must be an integer, at least 1"),
        (dict(decoder_sparse_step=0), r"decoder_sparse_step=0 must be an integer, at least 1"),
        (dict(mlp_only_layers=(-1,)), r"mlp_only_layers=\(-1,\) must be a tuple of layers"),
        (dict(mlp_only_layers=[1]), r"mlp_only_layers=\[1\] must be a tuple of layers"),
        (dict(norm_topk_prob=1), r"norm_topk_prob=1 is not a bool"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        Qwen3MoeConfig(**TINY | changes)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported, only attention_bias=Fal"),
        ({"mlp_only_layers": 3}, "mlp_only_layers=3 must be a list of layers"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers=\('a',\) must be a tuple of layers"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts=4 and num_local_experts=8"),
        ({"num_experts": 4}, r"top_k=8 exceeds n_expert=4 \(num_experts_per_tok in the file\)"),
        ({"num_experts": 0}, r"n_expert=0 must be .* \(num_experts in the file\)"),
        ({"use_sliding_window": 1}, "use_sliding_window=1 is not a bool"),
    ],
)
def test_files_that_mean_nothing_are_refused(contents, message) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_dict({"model_type": "qwen3_moe", **contents})


def test_windows_that_some_layers_have_cannot_be_written() -> None:
    config = Qwen3MoeConfig(**TINY, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="cannot be those of a qwen3_moe"):
        config_to_dict(config)


#: Ours is written where theirs is None, or the other way round; none changes what is computed.
NOT_COMPARED = {"architectures", "rope_parameters", "rope_scaling"}


def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    from transformers import AutoConfig

    ours = config_from_dict({"model_type": "qwen3_moe"})
    written = config_to_dict(ours)
    defaults = AutoConfig.for_model("qwen3_moe")
    shared = {*written} & {*defaults.to_dict()} - NOT_COMPARED | {"num_experts"}
    assert len(shared) > 20
    for key in shared:
        assert getattr(defaults, key) == written[key], key
    assert ours.rope_theta == defaults.rope_parameters["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).num_experts == 128
