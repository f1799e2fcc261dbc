"""What a config.json may say of a model that our code does not compute: refused by name."""

import time
from typing import Any

import pytest

from lm_from_scratch.checkpoint.configs import ELSEWHERE, config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.dialects import DIALECTS
from lm_from_scratch.models.qwen2 import Qwen2Config

each_family = pytest.mark.parametrize("family", DIALECTS)


def refusal(family: str, **contents: Any) -> str:
    with pytest.raises(ValueError) as error:
        config_from_dict({"model_type": family, **contents})
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "family"),
    [(key, name) for key in ELSEWHERE for name in DIALECTS if key not in DIALECTS[name].absent],
)
def test_what_other_families_do_is_refused_by_name(key: str, family: str) -> None:
    if key in DIALECTS[family].absent:
        return  # its own
    on = True if ELSEWHERE[key] is False else 30.0
    said = refusal(family, **{key: on})
    assert said == f"{key}={on} is not supported, only {key}={ELSEWHERE[key]}"
    off = {None, ELSEWHERE[key]}
    plain = config_from_dict({"model_type": family})
    assert all(config_from_dict({"model_type": family, key: value}) == plain for value in off)


@each_family
@pytest.mark.parametrize("key", ["use_qk_norm", "attn_output_gate"])
def test_a_switch_must_say_what_the_family_is(key: str, family: str) -> None:
    """Qwen3, what came of it and Gemma norm queries and keys, and from Qwen3-Next on it has
    gates."""
    on = {"use_qk_norm": ("qwen3", "gemma"), "attn_output_gate": ("qwen3_next", "qwen3_5")}
    is_on = family.startswith(on[key])
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


@pytest.mark.parametrize("family", ["glm4_moe", "gemma2", "mixtral", "deepseek_v2", "deepseek_v32"])
def test_families_that_share_a_part_alone_are_refused(family: str) -> None:
    assert refusal(family).startswith(f"model_type is '{family}'; only 'gpt2', 'qwen2', ")


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
@each_family
def test_biases_are_where_the_class_of_transformers_reads_them(key: str, family: str) -> None:
    from transformers import AutoConfig

    if key in DIALECTS[family].only:
        assert refusal(family, **{key: True}) == f"{key}=True is not supported, only {key}=False"
        return
    config = config_from_dict({"model_type": family, key: True})
    is_read = hasattr(AutoConfig.for_model(family), key)
    assert (config.mlp_bias if key == "mlp_bias" else config.o_bias) == is_read
    if is_read:
        written = config_to_dict(config, family)
        assert written[key] is True and config_from_dict(written) == config


@pytest.mark.parametrize("family", ["gpt2", *DIALECTS])
def test_a_small_vocabulary_need_not_name_its_tokens(family: str) -> None:
    """What nobody wrote cannot be refused; what somebody wrote is."""
    config = config_from_dict({"model_type": family, "vocab_size": 1})
    ids = {getattr(config, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    assert ids <= {None, 0}
    ours = type(config)(vocab_size=1)
    assert {ours.bos_token_id, ours.eos_token_id, ours.pad_token_id} <= {None, 0}
    with pytest.raises(ValueError, match="eos_token_id=5 is not below vocab_size=1"):
        type(config)(vocab_size=1, eos_token_id=5)


@pytest.mark.parametrize("family", ["gpt2", *DIALECTS])
def test_a_model_that_sees_what_comes_after_is_refused(family: str) -> None:
    """Models of embeddings are published like this; transformers takes null for no as well."""
    for value in (False, None, 0):
        assert refusal(family, is_causal=value) == (
            f"is_causal={value} is not supported, only is_causal=True"
        )
    assert config_from_dict({"model_type": family, "is_causal": True})


#: Nothing that a file may hold; each would size a loop, differ from itself, or move a cursor.
ODD = [
    None, True, -1, 0, 2.5, 2 * 10**9, 10**30, float("nan"), float("inf"), "x", "\x1b[31m\n", [],
    [float("nan")], ["\x1b[31m\n"], {}, {"rope_type": "\x1b[31m\n"}, {"0": float("nan")},
]  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", *DIALECTS])
def test_an_odd_value_of_any_key_is_read_at_once_or_refused_in_one_line(family: str) -> None:
    from transformers import AutoConfig

    keys = {*AutoConfig.for_model(family).to_dict(), *ELSEWHERE, "num_local_experts", "rope_theta"}
    keys |= {"rope_scaling", "num_nextn_predict_layers", "is_causal", "partial_rotary_factor"}
    refused = 0
    for key in sorted(keys - {"model_type"}):
        for odd in ODD:
            contents = {"model_type": family, "num_experts": 4, "num_experts_per_tok": 2, key: odd}
            start = time.monotonic()
            try:
                config_from_dict(contents)
            except ValueError as error:
                refused += 1
                message = str(error)
                assert message.isprintable() and len(message) < 600, (key, message)
            assert time.monotonic() - start < 5, (key, odd)  # and not a list of 2e9 layers
    assert refused > 100


@pytest.mark.parametrize("sizes", [(14, 3), (16, 4)])
def test_what_is_made_here_has_a_model_type_that_transformers_accepts(sizes) -> None:
    """Llama's config refuses heads that do not divide the features, Mistral's does not."""
    from transformers import AutoConfig

    n_embd, n_head = sizes
    config = Qwen2Config(
        n_embd=n_embd, n_head=n_head, n_kv_head=n_head, head_dim=4, n_layer=1, qkv_bias=False
    )
    written = config_to_dict(config)
    assert AutoConfig.for_model(**written).hidden_size == n_embd
    assert config_from_dict(written) == config
