"""resize.py: what was known stays known, and what is tied stays tied."""

import json

import pytest
import torch
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.weights.resize import resize_token_embeddings_

MAKE = {
    "gpt2": tiny_gpt2,
    "qwen2": tiny_qwen2,
    "untied": lambda: tiny_qwen2(tie_word_embeddings=False),
}


@pytest.mark.parametrize("size", [90, 97, 110])
@pytest.mark.parametrize("kind", MAKE)
def test_a_vocabulary_of_another_size(kind, size, tmp_path) -> None:
    model, idx = MAKE[kind](), token_ids(2, 7, high=90)
    twin = hf_twin(model)
    twin.resize_token_embeddings(size)
    kept = min(size, 97)
    want = model(idx)[..., :kept]
    resize_token_embeddings_(model, size)
    got = model(idx)
    assert got.shape[-1] == size == model.config.vocab_size == model.backbone.config.vocab_size
    torch.testing.assert_close(got[..., :kept], want, atol=1e-5, rtol=0)
    torch.testing.assert_close(got[..., :kept], twin(idx).logits[..., :kept], atol=5e-5, rtol=0)
    assert len(list(model.parameters())) == len(list(twin.parameters()))  # tied as before
    if size > 97:
        got[..., 97:].sum().backward()
        assert model.head.weight.grad[97:].abs().sum() > 0
    save_pretrained(model, tmp_path / "model")
    again = from_pretrained(tmp_path / "model")
    torch.testing.assert_close(again(idx), model(idx), atol=1e-5, rtol=0)


def test_a_vocabulary_that_cannot_be_resized_is_left_alone() -> None:
    model = tiny_qwen2(eos_token_id=96)
    for size, message in ((0, "vocab_size=0"), ("x", "vocab_size='x'"), (90, "eos_token_id")):
        with pytest.raises(ValueError, match=message):
            resize_token_embeddings_(model, size)
    assert model.config.vocab_size == len(model.head.weight) == 97


@torch.no_grad()
@pytest.mark.parametrize("kind", [SequenceClassifier, TokenClassifier])
@pytest.mark.parametrize("family", [tiny_gpt2, tiny_qwen2])
def test_a_classifier_reads_another_vocabulary(family, kind, tmp_path) -> None:
    model, idx = kind(family().backbone, 3).eval(), token_ids(2, 7)
    want = model(idx)
    resize_token_embeddings_(model, 110)
    assert torch.equal(model(idx), want) and model.backbone.config.vocab_size == 110
    save_pretrained(model, tmp_path / "m")
    again = classifier_from_pretrained(tmp_path / "m")
    assert torch.equal(again(idx + 12), model(idx + 12))


@pytest.mark.parametrize(
    ("ids", "kept"), [(100, None), ([5, 100], (5,)), ([100, 101], None), (5, 5), (150, None)]
)
def test_a_token_that_meant_none_is_none_in_a_larger_vocabulary(ids, kept, tmp_path) -> None:
    save_pretrained(tiny_qwen2(), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    model = from_pretrained(tmp_path / "m")
    resize_token_embeddings_(model, 110)
    save_pretrained(model, tmp_path / "again")
    again = from_pretrained(tmp_path / "again")
    assert again.config == model.config and again.config.eos_token_id == kept
