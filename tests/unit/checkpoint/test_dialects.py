"""What a config.json may say of a model that our code does not compute: refused by name."""

from typing import Any

import pytest

from lm_from_scratch.checkpoint.configs import ELSEWHERE, config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.dialects import DIALECTS

each_family = pytest.mark.parametrize("family", DIALECTS)


def refusal(family: str, **contents: Any) -> str:
    with pytest.raises(ValueError) as error:
        config_from_dict({"model_type": family, **contents})
    return str(error.value)


@each_family
@pytest.mark.parametrize("key", ELSEWHERE)
def test_what_other_families_do_is_refused_by_name(key: str, family: str) -> None:
    on = True if ELSEWHERE[key] is False else 30.0
    said = refusal(family, **{key: on})
    assert said == f"{key}={on} is not supported, only {key}={ELSEWHERE[key]}"
    off = {None, ELSEWHERE[key]}
    plain = config_from_dict({"model_type": family})
    assert all(config_from_dict({"model_type": family, key: value}) == plain for value in off)


@each_family
@pytest.mark.parametrize("key", ["use_qk_norm", "attn_output_gate"])
def test_a_switch_must_say_what_the_family_is(key: str, family: str) -> None:
    """Qwen3 and what came of it norm queries and keys, and Qwen3-Next has gates."""
    is_on = family.startswith("qwen3") if key == "use_qk_norm" else family == "qwen3_next"
    said = refusal(family, **{key: not is_on})
    assert said == f"{key}={not is_on} is not supported, only {key}={is_on}"
    assert config_from_dict({"model_type": family, key: is_on}) == config_from_dict(
        {"model_type": family}
    )


@pytest.mark.parametrize(
    ("key", "value", "only"),
    [
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("topk_method", "group_limited_greedy", "noaux_tc"),
        ("moe_layer_freq", 2, "1"),
    ],
)
def test_deepseek_is_routed_in_one_way(key: str, value: Any, only: str) -> None:
    """The published file says which; that of DeepSeek-V2 says another."""
    assert refusal("deepseek_v3", **{key: value}).endswith(f"is not supported, only {key}={only}")
    written = config_to_dict(config_from_dict({"model_type": "deepseek_v3"}))
    assert str(written[key]) == only


def test_experts_are_counted_under_either_name_and_not_under_two() -> None:
    from transformers import AutoConfig

    for family, name in (("deepseek_v3", "n_routed_experts"), ("qwen3_moe", "num_experts")):
        for key in (name, "num_local_experts"):
            theirs = AutoConfig.for_model(family, **{key: 64})
            ours = config_from_dict({"model_type": family, key: 64})
            assert ours.n_expert == getattr(theirs, name) == 64
        said = refusal(family, **{name: 64, "num_local_experts": 32})
        assert said == f"{name}=64 and num_local_experts=32 name the same number"


@pytest.mark.parametrize(
    "family", ["gpt_oss", "glm4_moe", "gemma3_text", "mixtral", "deepseek_v2", "deepseek_v32"]
)
def test_families_that_share_a_part_alone_are_refused(family: str) -> None:
    assert refusal(family).startswith(f"model_type is '{family}'; only 'gpt2', 'qwen2', ")
