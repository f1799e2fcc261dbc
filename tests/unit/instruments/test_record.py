"""record.py: what it records is what the model computed, and the model does not notice."""

import pytest
import torch
from tiny_models import hf_twin, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.instruments.record import record_attention, record_hidden_states, record_saved


def test_recording_returns_real_weights_and_changes_nothing() -> None:
    model, idx = tiny_gpt2(), token_ids(2, 9)
    before = model(idx)
    attends = [block.attn.attend for block in model.transformer.h]
    with record_attention(model) as maps:
        assert torch.equal(model(idx), before)
    assert [block.attn.attend for block in model.transformer.h] == attends
    assert len(maps) == model.config.n_layer
    for layer in maps:
        assert layer[0].shape == (2, 4, 9, 9)
        torch.testing.assert_close(layer[0].sum(-1), torch.ones(2, 4, 9))
        assert (layer[0].triu(1) == 0).all()


def test_recording_is_undone_after_an_error() -> None:
    model = tiny_gpt2()
    attends = [block.attn.attend for block in model.transformer.h]
    with pytest.raises(ValueError, match="block_size"), record_attention(model):
        model(token_ids(1, 65))
    assert [block.attn.attend for block in model.transformer.h] == attends


def test_recorded_weights_hold_no_graph() -> None:
    model = tiny_gpt2()
    with record_attention(model) as maps:
        model(token_ids(1, 5)).sum().backward()
    assert not any(layer[0].requires_grad for layer in maps)


def test_hidden_states_before_and_after_the_last_norm() -> None:
    for model in (tiny_qwen2(), tiny_gpt2()):
        idx = token_ids(2, 9)
        backbone = model.backbone
        with record_hidden_states(model) as states:
            model(idx)
        assert [len(state) for state in states] == [1] * 5
        norm = getattr(backbone, "norm", None) or backbone.ln_f
        raw, final = states[-2][0], states[-1][0]
        torch.testing.assert_close(norm(raw), final)
        assert (raw - final).abs().max() > 0.1
        torch.testing.assert_close(backbone(idx), final)
        assert not backbone.training and not final.requires_grad


def test_hidden_states_equal_those_of_transformers_where_it_has_them() -> None:
    for model in (tiny_gpt2(), tiny_qwen2()):
        idx = token_ids(2, 9)
        want = hf_twin(model)(idx, output_hidden_states=True).hidden_states
        with record_hidden_states(model) as states:
            model(idx[:, :4])
            model(idx)
        assert all(len(state) == 2 for state in states)
        for got, theirs in zip([*states[:-2], states[-1]], want, strict=True):
            torch.testing.assert_close(got[1], theirs, atol=5e-5, rtol=1e-5)


def test_hidden_states_are_recorded_from_embeddings_too_and_no_hook_stays() -> None:
    model = tiny_qwen2()
    x = torch.randn(1, 5, 48)
    with record_hidden_states(model) as states:
        final = model.model(x)
    assert torch.equal(states[0][0], x) and torch.equal(states[-1][0], final)
    model(token_ids(1, 5))
    assert len(states[0]) == 1
    with (
        pytest.raises(ValueError, match="no attention layer"),
        record_hidden_states(torch.nn.Linear(2, 2)),
    ):
        pass


def test_saved_bytes_are_counted_once_and_without_the_parameters() -> None:
    layer = torch.nn.Linear(5, 3)
    x = torch.randn(7, 5, requires_grad=True)
    with record_saved(layer) as saved:
        y = layer(x)  # keeps x and the weight
    assert sum(saved.values()) == x.nbytes
    with record_saved(layer) as saved:
        (y.exp() + layer(x) + layer(x.view(7, 5))).sum()  # exp keeps its result; x is one storage
    assert sum(saved.values()) == x.nbytes + y.nbytes
    with record_saved() as saved:
        layer(x)
    assert sum(saved.values()) == x.nbytes + layer.weight.nbytes
    layer(x).exp()
    assert len(saved) == 2  # nothing is counted behind the block


def test_hidden_states_may_keep_their_gradients() -> None:
    model, idx = tiny_qwen2(), token_ids(1, 5)
    with record_hidden_states(model, detach=False) as states:
        model(idx).sum().backward(inputs=list(model.parameters()))
    grown = states[2][0]
    assert grown.requires_grad
    with record_hidden_states(model, detach=False) as states:
        total = model(idx).logsumexp(-1).sum()
    (gradient,) = torch.autograd.grad(total, states[2][0])
    assert gradient.shape == grown.shape and gradient.abs().sum() > 0
