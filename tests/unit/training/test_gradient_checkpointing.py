"""gradient_checkpointing.py: the same gradients from less memory."""

import copy

import pytest
import torch
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.cache.growing import GrowingCache
from lm_from_scratch.training.gradient_checkpointing import use_gradient_checkpointing_


def test_gradient_checkpointing_changes_no_gradient_and_writes_no_cache() -> None:
    for model in (tiny_qwen2(sliding_window=3, max_window_layers=1), tiny_gpt2()):
        idx, twin = token_ids(2, 9), copy.deepcopy(model)
        names = list(model.state_dict())
        use_gradient_checkpointing_(twin)
        use_gradient_checkpointing_(twin)  # twice is once
        assert list(twin.state_dict()) == names
        model(idx).square().mean().backward()
        twin(idx).square().mean().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        cache = GrowingCache(3)
        with pytest.raises(ValueError, match="would write its cache twice"):
            twin(idx, cache=cache)
        assert cache.length == 0
        for parameter in twin.parameters():  # not even where no key needs a gradient
            parameter.requires_grad_(False)
        next(p for n, p in twin.named_parameters() if ".2.mlp" in n).requires_grad_()
        with pytest.raises(ValueError, match="would write its cache twice"):
            twin(idx, cache=cache)
        with torch.no_grad():
            twin(idx[:, :4], cache=cache)
            assert cache.length == 4


def test_gradient_checkpointing_keeps_less() -> None:
    kept = {}
    for name in ("plain", "checkpointed"):
        model = tiny_qwen2(n_layer=6)
        if name == "checkpointed":
            use_gradient_checkpointing_(model)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            model(token_ids(2, 40))
        kept[name] = sum(sizes)
    assert kept["checkpointed"] < 0.2 * kept["plain"]


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_is_drawn_again_as_it_was_and_each_block_runs_twice(autocast: bool) -> None:
    idx, grads, runs = token_ids(2, 9), [], []
    for checkpointed in (False, True):
        model = tiny_qwen2(attention_dropout=0.5).train()
        if checkpointed:
            use_gradient_checkpointing_(model)
            use_gradient_checkpointing_(model)
            model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(idx).float().square().mean()
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert len(runs) == 2
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
