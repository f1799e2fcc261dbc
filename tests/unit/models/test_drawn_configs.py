"""models/qwen2.py against transformers: settings drawn at random, in every kind of attention."""

import itertools

import pytest
import torch
from caches import in_chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import (
    ROPES,
    ours_from_hf,
    tiny_hf_qwen2,
    token_ids,
)

from lm_from_scratch.attention.kinds import ATTENTION_KINDS, use_attention_
from lm_from_scratch.instruments.record import record_attention, record_hidden_states
from lm_from_scratch.models.qwen2 import (
    FULL,
    SLIDING,
    Qwen2ForCausalLM,
)
from lm_from_scratch.text.batches import padded_batch
from lm_from_scratch.text.targets import IGNORE
from lm_from_scratch.training.loss import causal_lm_loss

pytestmark = pytest.mark.slow


@st.composite
def configs(draw) -> dict:
    """A random configuration for transformers' Qwen2, with a seed for its weights."""
    n_kv_head = draw(st.integers(1, 3))
    n_layer = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([4, 6, 8, 10]))  # transformers' dynamic fails at 2
    heads = n_kv_head * draw(st.integers(1, 3))
    own_width = draw(st.booleans())
    config = {
        "num_hidden_layers": n_layer,
        "num_attention_heads": heads,
        "num_key_value_heads": n_kv_head,
        "head_dim": head_dim,
        "hidden_size": draw(st.sampled_from([14, 24, 33])) if own_width else heads * head_dim,
        "intermediate_size": draw(st.sampled_from([13, 40])),
        "vocab_size": draw(st.integers(11, 131)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "silu", "gelu", "relu"])),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "rope_parameters": draw(st.sampled_from(ROPES)),
    }
    slides = draw(st.sampled_from(["no", "max_window_layers", "layer_types"]))
    if slides != "no":
        config |= {"use_sliding_window": True, "sliding_window": draw(st.integers(2, 6))}
    if slides == "max_window_layers":
        config["max_window_layers"] = draw(st.integers(0, n_layer))
    if slides == "layer_types":
        kinds = st.sampled_from([FULL, SLIDING])
        config["layer_types"] = draw(st.lists(kinds, min_size=n_layer, max_size=n_layer))
    return config | {"seed": draw(st.integers(0, 10**6))}


def draw_pair(config: dict) -> tuple[Qwen2ForCausalLM, torch.nn.Module, torch.Tensor]:
    config = dict(config)
    seed = config.pop("seed")
    twin = tiny_hf_qwen2(seed=seed, **config)
    idx = token_ids(2, 12, seed=seed, high=config["vocab_size"])
    return ours_from_hf(twin), twin, idx


@settings(max_examples=40)
@given(configs())
def test_drawn_configs_give_the_logits_loss_gradients_and_states_of_transformers(
    config: dict,
) -> None:
    ours, twin, idx = draw_pair(config)
    labels = idx.clone()
    labels[0, :3] = IGNORE
    want = twin(idx, labels=labels, output_hidden_states=True)
    with record_hidden_states(ours) as states:
        logits = ours(idx)
    torch.testing.assert_close(logits, want.logits, atol=5e-5, rtol=0)
    kept = [state[0] for state in states[:-2]] + [states[-1][0]]
    for mine, theirs in zip(kept, want.hidden_states, strict=True):
        torch.testing.assert_close(mine, theirs, atol=5e-5, rtol=1e-5)
    targets = torch.full_like(idx, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    loss = causal_lm_loss(logits, targets)
    torch.testing.assert_close(loss, want.loss, atol=1e-5, rtol=0)
    loss.backward()
    want.loss.backward()
    theirs = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in ours.named_parameters():
        torch.testing.assert_close(p.grad, theirs[name], atol=1e-4, rtol=1e-4, msg=name)


@settings(max_examples=40)
@given(configs(), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_drawn_configs_padded_and_chunked_equal_transformers_in_every_kind(
    config: dict, chunks: list
) -> None:
    ours, twin, _ = draw_pair(config)
    high = config["vocab_size"]
    length = min(14, sum(chunks[:3]))
    rows = [
        token_ids(n, seed=i, high=high).tolist()
        for i, n in enumerate((length, max(1, length - 2), 1))
    ]
    with torch.no_grad():
        wants = [twin(torch.tensor([row])).logits[0] for row in rows]
    for kind, side in itertools.product(ATTENTION_KINDS, ("left", "right")):
        use_attention_(ours, kind)
        with torch.no_grad():
            batch = padded_batch(rows, 0, side)
            padded = ours(batch.idx, positions=batch.positions)
            cuts = [min(4, length - i) for i in range(0, length, 4)]
            fed = in_chunks(batch.idx, cuts, batch.positions, model=ours)
            for i, want in enumerate(wants):
                real = batch.positions[i] >= 0
                torch.testing.assert_close(padded[i][real], want, atol=5e-5, rtol=0, msg=kind)
                torch.testing.assert_close(fed[i][real], want, atol=5e-5, rtol=0, msg=kind)


@settings(max_examples=15)
@given(configs(), st.sampled_from(list(ATTENTION_KINDS)))
def test_drawn_configs_have_the_attention_weights_of_transformers_in_every_kind(
    config: dict, kind: str
) -> None:
    ours, twin, idx = draw_pair(config)
    use_attention_(ours, kind)
    twin.set_attn_implementation("eager")
    want = twin(idx, output_attentions=True).attentions
    with torch.no_grad(), record_attention(ours) as maps:
        ours(idx)
    for mine, theirs in zip(maps, want, strict=True):
        torch.testing.assert_close(mine[0], theirs, atol=1e-5, rtol=0)
