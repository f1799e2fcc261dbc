"""What GPT-2 may not do, on tiny random models with large weights. That it computes what
transformers does: tests/parity."""

import math

import pytest
import torch
from tiny_models import TINY, hf_twin, tiny_gpt2, token_ids

from lm_from_scratch.attention.kinds import use_attention_
from lm_from_scratch.attention.masks import positions_from_mask
from lm_from_scratch.models.gpt2 import SIZES, GPT2Config, GPT2LMHeadModel


def test_left_padding_counts_positions_from_the_first_real_token() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 9)
    mask = torch.tensor([[0] * 4 + [1] * 9] * 2)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), idx], dim=1)
    alone = model(idx)
    good = model(padded, positions=positions_from_mask(mask))[:, 4:]
    torch.testing.assert_close(good, alone, atol=5e-5, rtol=0)
    pads_counted = torch.where(mask.bool(), torch.arange(13), -1)
    bad = model(padded, positions=pads_counted)[:, 4:]
    assert (bad - alone).abs().max() > 1.0  # what the historic code computed


def test_no_buffer_travels_with_the_weights() -> None:
    model = tiny_gpt2()
    assert list(model.buffers()) == []
    assert not [name for name in model.state_dict() if name.endswith(".attn.bias")]
    other = tiny_gpt2(block_size=64)
    other.load_state_dict(model.state_dict())


def test_tied_weight_is_drawn_once_and_residual_projections_start_smaller() -> None:
    torch.manual_seed(3)
    config = GPT2Config(**{**TINY, "n_embd": 64, "n_layer": 8, "vocab_size": 997})
    model = GPT2LMHeadModel(config)
    state = model.state_dict()
    assert abs(state["transformer.wte.weight"].std().item() - 0.02) < 5e-4
    for name, tensor in state.items():
        if name.endswith("c_proj.weight"):
            assert abs(tensor.std().item() - 0.02 / math.sqrt(16)) < 4e-4
        elif name.endswith(("c_attn.weight", "c_fc.weight")):
            assert abs(tensor.std().item() - 0.02) < 1e-3
        elif name.endswith("bias"):
            assert (tensor == 0).all()


def test_nothing_can_untie_the_head() -> None:
    model, idx = tiny_gpt2(), token_ids(1, 5)
    fresh = tiny_gpt2(seed=1)
    fresh.load_state_dict(model.state_dict(), assign=True)
    torch.testing.assert_close(fresh(idx), model(idx))
    model.transformer.wte = torch.nn.Embedding(97, 28)
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    assert (model(idx) == 0).all()  # the head followed
    names = [name for name, _ in fresh.named_parameters()]
    assert not any("lm_head" in name for name in names)


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    model = tiny_gpt2()
    with pytest.raises(ValueError, match="65 tokens, but block_size=64"):
        model(token_ids(1, 65))
    with pytest.raises(ValueError, match="71 tokens, but block_size=64"):
        model(token_ids(1, 2), positions=torch.tensor([[0, 70]]))
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        model(token_ids(5))


def test_dropout_acts_in_training_alone() -> None:
    model = tiny_gpt2(embd_pdrop=0.2, resid_pdrop=0.2, attn_pdrop=0.2)
    idx = token_ids(2, 9)
    assert torch.equal(model(idx), model(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_parameters_is_that_of_the_formula(name: str) -> None:
    config = GPT2Config(**SIZES[name])
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    V, T, C, L = config.vocab_size, config.block_size, config.n_embd, config.n_layer
    formula = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
    assert sum(p.numel() for p in model.parameters()) == formula


def test_weights_are_large_enough_to_show_a_bug() -> None:
    """At std 0.02 the model without position embeddings hardly differs."""
    for std, low, high in ((0.25, 1.0, 99.0), (0.02, 0.0, 0.3)):
        model, idx = tiny_gpt2(std=std), token_ids(2, 12)
        before = model(idx)
        with torch.no_grad():
            model.transformer.wpe.weight.zero_()
        assert low < (model(idx) - before).abs().max() < high


def test_the_last_position_has_its_own_embedding() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 64)  # as long as block_size
    torch.testing.assert_close(hf_twin(model)(idx).logits, model(idx), atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", ["embd_pdrop", "attn_pdrop", "resid_pdrop"])
@pytest.mark.parametrize("kind", ["formula", "sdpa"])
def test_each_dropout_acts_alone(name: str, kind: str) -> None:
    model, idx = tiny_gpt2(**{name: 0.4}).train(), token_ids(2, 9)
    use_attention_(model, kind)
    assert not torch.equal(model(idx), model(idx))


def test_residual_dropout_stands_behind_attention_and_mlp() -> None:
    model, idx = tiny_gpt2(resid_pdrop=0.5).train(), token_ids(2, 9)
    shares = {}
    for part in ("attn", "mlp"):
        getattr(model.transformer.h[0], part).register_forward_hook(
            lambda module, args, out, part=part: shares.update({part: (out == 0).float().mean()})
        )
    model(idx)
    assert 0.35 < shares["attn"] < 0.65 and 0.35 < shares["mlp"] < 0.65
