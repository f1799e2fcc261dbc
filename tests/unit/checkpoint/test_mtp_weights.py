"""Published files hold layers for multi-token prediction beside the model: it is read without."""

import json

import pytest
import torch
from mtp_layers import theirs
from safetensors.torch import load_file, save_file
from tiny_models import token_ids

from lm_from_scratch.checkpoint.weights import from_pretrained, load_checkpoint, save_pretrained

EXTRA = ["enorm.weight", "hnorm.weight", "eh_proj.weight", "self_attn.q_proj.weight"]


def folder_with(tmp_path, prefix: str, **config: object):
    """A Qwen3 of transformers, and other tensors in its file."""
    twin = theirs("qwen3", 1)
    twin.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{prefix}{name}": torch.zeros(2, 2) for name in EXTRA}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    contents = json.loads((tmp_path / "config.json").read_text()) | config
    (tmp_path / "config.json").write_text(json.dumps(contents))
    return twin


N = theirs("qwen3", 1).config.num_hidden_layers


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        ("mtp.layers.0.", {}),
        ("mtp.", {}),
        ("model.mtp.layers.0.", {}),
        (f"model.layers.{N}.", {"num_nextn_predict_layers": 1}),
        (f"model.layers.{N + 1}.", {"num_nextn_predict_layers": 2}),
        (f"model.layers.{N + 1}.", {"num_nextn_predict_layers": 10**9}),  # compared, not listed
        (f"model.layers.{N}.", {"num_mtp_layers": 1}),
    ],
)
def test_layers_beside_the_model_are_passed_over(tmp_path, prefix, config) -> None:
    twin, idx = folder_with(tmp_path, prefix, **config), token_ids(1, 6)
    checkpoint = load_checkpoint(tmp_path)
    model = checkpoint.model
    torch.testing.assert_close(model(idx), twin(idx).logits, atol=5e-5, rtol=0)
    save_pretrained(model, tmp_path / "again", published=checkpoint.published)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert not any(written[key] for key in config) and written.keys() >= config.keys()
    assert torch.equal(from_pretrained(tmp_path / "again")(idx), model(idx))


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        (f"model.layers.{N}.", {}),
        (f"model.layers.{N}.", {"num_nextn_predict_layers": 0}),
        (f"model.layers.{N + 1}.", {"num_nextn_predict_layers": 1}),
        ("model.mtp_layers.", {}),
    ],
)
def test_what_no_config_speaks_of_is_refused_by_name(tmp_path, prefix, config) -> None:
    folder_with(tmp_path, prefix, **config)
    with pytest.raises(ValueError, match=f"unexpected {prefix}enorm.weight"):
        from_pretrained(tmp_path)
