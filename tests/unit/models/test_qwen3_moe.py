"""What Qwen3 with experts has of its own: its files, its sizes, and the loss that balances its
router. That it computes what transformers does: tests/parity."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import near, pair
from safetensors.torch import load_file, save_file
from tiny_models import enlarge_, token_ids

from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lm_from_scratch.text.batch import padded_batch
from lm_from_scratch.training.balance import balancing_loss, record_routing
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


@pytest.mark.parametrize("seed", range(8))
def test_the_balancing_loss_of_padded_rows_is_that_of_transformers(seed: int) -> None:
    """No padding counts in it."""
    both = pair("qwen3_moe", seed)
    model = both.ours
    sparse = [n for n in range(model.config.n_layer) if model.config.has_experts(n)]
    if not sparse:
        return
    rows = [token_ids(9, seed=seed).tolist(), token_ids(5, seed=seed + 1).tolist()]
    batch = padded_batch(rows, 0, "left")
    want = both.theirs(batch.idx, batch.positions, output_router_logits=True).aux_loss
    with record_routing(model) as routings:
        model(batch.idx, positions=batch.positions)
    balance = balancing_loss([layer[0] for layer in routings], batch.positions >= 0)
    gate, their_gate = (m.model.layers[sparse[-1]].mlp.gate.weight for m in (model, both.twin))
    (gradient,) = torch.autograd.grad(balance, gate)
    (their_gradient,) = torch.autograd.grad(want, their_gate)
    near(balance, want)
    near(gradient, their_gradient)


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
