"""gpt-oss: published layout, four-bit folders, the pieces that no other family has. That it
computes what transformers does: tests/parity."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import enlarge_, hf_twin, token_ids
from torch import Tensor

from lm_from_scratch.checkpoint.weights import from_pretrained, load_checkpoint, save_pretrained
from lm_from_scratch.models.gpt_oss import GptOssConfig, GptOssForCausalLM, clamped_swiglu
from lm_from_scratch.models.qwen2 import FULL, SLIDING
from lm_from_scratch.optim.choose import parameter_groups
from lm_from_scratch.weights.float4 import encode_mxfp4


def tiny(**changes: Any) -> GptOssForCausalLM:
    sizes = dict(
        vocab_size=97, n_layer=3, n_head=6, n_kv_head=2, n_embd=64, intermediate_size=32,
        head_dim=8, n_expert=5, top_k=2, sliding_window=4, eos_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM(GptOssConfig(**{**sizes, **changes})).eval()
    enlarge_(model)
    return model


def test_the_first_layer_slides_and_every_other_one() -> None:
    assert GptOssConfig(n_layer=5).layer_types == (SLIDING, FULL, SLIDING, FULL, SLIDING)
    assert tiny().config.windows == [4, None, 4]
    with pytest.raises(ValueError, match="layer_types has"):
        GptOssConfig(n_layer=1, layer_types=("linear_attention",))


def test_the_gated_product_by_hand() -> None:
    gate, up = torch.tensor([0.0, 1.0, 9.0, -9.0, 2.0]), torch.tensor([5.0, 0.0, 0.0, -9.0, 9.0])
    g, u = [0.0, 1.0, 7.0, -9.0, 2.0], [5.0, 0.0, 0.0, -7.0, 7.0]
    want = torch.tensor(g) * torch.sigmoid(1.702 * torch.tensor(g)) * (torch.tensor(u) + 1)
    torch.testing.assert_close(clamped_swiglu(gate, up), want)
    assert clamped_swiglu(gate, up)[1] > 0.8  # an up of 0 passes the gate


def test_biases_of_experts_are_not_pushed_to_zero() -> None:
    decayed, others = (group["params"] for group in parameter_groups(tiny(), 0.1))
    assert all(p.dim() >= 2 for p in decayed)
    assert sum(p.dim() == 2 for p in others) == 2 * 3


# ------------------------------------------------------------------------------ in four bits


def packed_folder(model: GptOssForCausalLM, folder: Path, **contents: Any) -> Path:
    """As the published folders are: experts in blocks and scales, all else in bfloat16."""
    save_pretrained(model.bfloat16(), folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = tensor
            continue
        codes, scales = encode_mxfp4(tensor.mT)
        tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16)).contiguous()
        tensors[f"{name}_scales"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | contents
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_folder_in_four_bits_is_what_transformers_makes_of_it(tmp_path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model, idx = tiny(), token_ids(2, 12)
    exact = model(idx)
    folder = packed_folder(model, tmp_path / "packed")
    ours = load_checkpoint(folder)
    weight = ours.model.model.layers[1].mlp.experts.down_proj
    assert weight.dtype == torch.bfloat16 and weight.shape == (5, 32, 64)
    theirs: Any = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).eval()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor.bfloat16()), name
    theirs = theirs.float()
    theirs.config._experts_implementation = "eager"
    logits = ours.model.float()(idx)
    torch.testing.assert_close(logits, theirs(idx).logits, atol=5e-5 * logits.abs().max(), rtol=0)
    error = (logits - exact).norm() / exact.norm()
    assert 0.02 < error < 0.6

    # saved as numbers, and read by both
    save_pretrained(ours.model, tmp_path / "numbers", published=ours.published)
    assert "quantization_config" not in (tmp_path / "numbers/config.json").read_text()
    assert torch.equal(from_pretrained(tmp_path / "numbers")(idx), logits)
    twin = hf_twin(ours.model)
    twin.config._experts_implementation = "eager"
    torch.testing.assert_close(twin(idx).logits, theirs(idx).logits)


def test_blocks_without_scales_that_fit_are_refused(tmp_path) -> None:
    folder = packed_folder(tiny(), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for change in (
        {f"{name}_scales": tensors[f"{name}_scales"][:4].clone()},
        {f"{name}_scales": tensors[f"{name}_scales"].float()},
        {f"{name}_blocks": tensors[f"{name}_blocks"][..., :8].clone()},
    ):
        save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=f"{name}_blocks is torch.uint8 .* is needed"):
            from_pretrained(folder)
    del tensors[f"{name}_scales"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj_scales torch.float32 \(0,\)"):
        from_pretrained(folder)


def test_four_bits_beside_numbers_without_rows_or_without_a_value_are_refused(tmp_path) -> None:
    folder = packed_folder(tiny(), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    for change, reason in (
        ({name: torch.zeros(5, 32, 64)}, "is there twice, as numbers and in four bits"),
        ({f"{name}_scales": scales | 255}, "are not finite"),
        (
            {f"{name}_scales": scales[0, 0].clone(), f"{name}_blocks": blocks[0, 0].clone()},
            "needed",
        ),
        (
            {f"{name}_scales": scales[0, 0, 0].clone(), f"{name}_blocks": blocks[0, 0, 0].clone()},
            "needed",
        ),
    ):
        save_file(tensors | change, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=f"{name}.* {reason}"):
            from_pretrained(folder)
