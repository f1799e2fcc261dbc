"""Adapters of every published family: what we write peft opens, and we open what peft writes."""

import copy
from dataclasses import fields
from random import Random
from typing import Any

import pytest
import torch
from model_families import PUBLISHED, in_float64, near, pair, several_seeds
from tiny_models import token_ids
from torch import nn

from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.interop.peft import KNOWN, load_lora_, load_with_adapter, save_lora
from lm_from_scratch.weights.lora import adapters, add_lora_, backbone_linears, merge_lora_

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns of what transformers deprecates

WITH_EXPERTS = ["qwen3_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text"]
every_family = pytest.mark.parametrize("family", PUBLISHED)
IDX = token_ids(2, 7)


@torch.no_grad()
def shift_(model: nn.Module, seed: int) -> None:
    """As if it had been trained: every adapter moves."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.3


def theirs(twin: nn.Module) -> torch.Tensor:
    with in_float64(), torch.no_grad():
        return twin.eval()(IDX, use_cache=False).logits


@every_family
@pytest.mark.parametrize("seed", several_seeds(range(12), quick=1))
def test_peft_opens_adapters_on_every_map_and_computes_the_same(tmp_path, family, seed) -> None:
    """Beside the model, alone in a folder that names it, and given to a model: always the same."""
    import peft
    from transformers import AutoModelForCausalLM

    both = pair(family, seed)
    model, twin = copy.deepcopy(both.ours), copy.deepcopy(both.twin)
    twin.save_pretrained(tmp_path / "base")
    add_lora_(model, rank=1, alpha=3.0, dropout=0.25)  # for a parameter peft has none
    shift_(model, seed)
    save_lora(model, tmp_path / "lora", str(tmp_path / "base"))
    with torch.no_grad():
        expected = model(IDX)
    assert (expected - both.ours(IDX)).abs().max() > 1e-3
    loaded = peft.PeftModel.from_pretrained(twin, tmp_path / "lora", autocast_adapter_dtype=False)
    near(expected, theirs(loaded))
    alone = AutoModelForCausalLM.from_pretrained(
        tmp_path / "lora", dtype=torch.float64,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    near(expected, theirs(alone), bound=1e-5)  # its adapters are float32
    for file in (tmp_path / "lora").iterdir():
        file.rename(tmp_path / "base" / file.name)
    near(load_with_adapter(tmp_path / "base").model(IDX).detach(), expected)
    with pytest.raises(ValueError, match=r"holds an adapter .* without which its model is another"):
        from_pretrained(tmp_path / "base")


def drawn_config(draw: Random, family: str, names: list[str]) -> dict[str, Any]:
    """Options of peft for some of the maps: those of an MLP beside experts are parameters there."""
    chosen = sorted(draw.sample(names, draw.randint(1, len(names))))
    mixture = family in WITH_EXPERTS
    ends = ("gate_proj", "up_proj", "down_proj")
    parameters = [n for n in chosen if mixture and n.endswith(ends)]
    one = draw.choice(chosen)
    key = f"{one}.weight" if one in parameters else one
    return dict(
        r=draw.choice([1, 2, 5]), lora_alpha=draw.choice([1, 4, 16]),
        target_modules=[n for n in chosen if n not in parameters],
        target_parameters=[f"{n}.weight" for n in parameters] or None,
        use_rslora=draw.choice([False, True]), fan_in_fan_out=family == "gpt2",
        rank_pattern=draw.choice([{}, {key: 3}]), alpha_pattern=draw.choice([{}, {"^" + key: 7}]),
        init_lora_weights=False,
    )  # fmt: skip


@every_family
@pytest.mark.parametrize("seed", several_seeds(range(12), quick=1))
def test_adapters_that_peft_wrote_compute_the_same_here(tmp_path, family, seed) -> None:
    """rsLoRA, ranks and alphas of single maps, more rank than a map has; saved again, the same."""
    import peft

    both = pair(family, seed)
    model, twin = copy.deepcopy(both.ours), copy.deepcopy(both.twin)
    options = drawn_config(Random(seed), family, [*backbone_linears(model)])
    loaded = peft.get_peft_model(twin, peft.LoraConfig(**options), autocast_adapter_dtype=False)
    loaded.save_pretrained(tmp_path / "lora")
    load_lora_(model, tmp_path / "lora")
    expected = theirs(loaded)
    near(model(IDX).detach(), expected)
    save_lora(model, tmp_path / "again")
    again = copy.deepcopy(both.ours)
    load_lora_(again, tmp_path / "again")
    assert torch.equal(again(IDX), model(IDX))
    twin = peft.PeftModel.from_pretrained(
        copy.deepcopy(both.twin), tmp_path / "again", autocast_adapter_dtype=False
    )
    near(expected, theirs(twin))
    merge_lora_(model)
    near(model(IDX).detach(), expected)


@pytest.mark.parametrize("family", WITH_EXPERTS[:3])  # whose experts peft finds by name
def test_adapters_on_experts_are_refused_by_name(tmp_path, family) -> None:
    import peft

    both = pair(family, next(s for s in range(9) if "experts" in str(pair(family, s).ours)))
    options = dict(target_modules=["o_proj", "gate_proj", "up_proj", "down_proj"], r=2)
    loaded = peft.get_peft_model(copy.deepcopy(both.twin), peft.LoraConfig(**options))
    loaded.save_pretrained(tmp_path)
    model = copy.deepcopy(both.ours)
    with pytest.raises(
        ValueError,
        match=r"adapter_config.json: target_parameters=\[.*'gate_up_proj'.* no experts in",
    ):
        load_lora_(model, tmp_path)
    assert not adapters(model)


def test_every_option_of_peft_is_known() -> None:
    """What it switches on by a field of its config is done, refused, or without effect here."""
    import peft

    assert {one.name for one in fields(peft.LoraConfig)} <= KNOWN


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"bias": "lora_only"}, "bias='lora_only'"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"trainable_token_indices": [5, 6]}, "trainable_token_indices="),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"target_modules": ["embed_tokens", "q_proj"]}, "unexpected '.*lora_embedding_A"),
    ({"target_modules": ["lm_head", "q_proj"]}, "unexpected 'lm_head.lora_a'"),
    ({"rank_pattern": {r".*\.0\..*q_proj": 3}}, "rank_pattern="),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_peft_does_and_we_do_not_is_refused_by_name(tmp_path, options, message) -> None:
    import peft

    both = pair("qwen3", 1)
    twin = copy.deepcopy(both.twin).float()
    loaded = peft.get_peft_model(
        twin, peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
    )
    loaded.save_pretrained(tmp_path)
    model = copy.deepcopy(both.ours)
    with pytest.raises(ValueError, match=message) as refusal:
        load_lora_(model, tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)
    assert not adapters(model)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig", "OFTConfig", "PrefixTuningConfig"])
def test_another_kind_of_adapter_is_refused_by_its_name(tmp_path, kind) -> None:
    import peft

    own = dict(num_virtual_tokens=3) if kind == "PrefixTuningConfig" else {}
    config = getattr(peft, kind)(**own, task_type="CAUSAL_LM")
    if not own:
        config.target_modules = ["q_proj"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"peft_type='.*' is not supported, only 'LORA'"):
        load_lora_(copy.deepcopy(pair("qwen3", 1).ours), tmp_path)
