"""Ideas are read from any config: of a known family, of an unknown one, old files, odd values."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm_from_scratch.__main__ import main
from lm_from_scratch.cache.slots import cache_for
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.cache_sizes import cached_numbers, states
from lm_from_scratch.checkpoint.configs import config_to_dict
from lm_from_scratch.checkpoint.families import complete, families
from lm_from_scratch.checkpoint.ideas import counts, describe
from lm_from_scratch.models import qwen2, qwen3, qwen3_moe
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.qwen2 import Qwen2Config
from lm_from_scratch.models.qwen3 import Qwen3Config
from lm_from_scratch.models.qwen3_moe import Qwen3MoeConfig
from lm_from_scratch.models.qwen3_next import Qwen3NextConfig
from lm_from_scratch.models.smollm3 import SmolLM3Config

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16}
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 8}


def said(**config: Any) -> dict[str, str]:
    return {line.name: line.text for line in describe(config)}


@pytest.mark.parametrize(
    ("config", "name", "text"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm", "in place of LayerNorm"),
        ({"attention_bias": True}, "bias", "q, k and v"),
        ({"num_key_value_heads": 2}, "grouped", "8 query heads share 2"),
        ({"tie_word_embeddings": True}, "tied", "the embedding is the head"),
        ({"sliding_window": 64}, "window", "64 tokens"),
        (
            {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
            "window",
            "64 tokens in 2 of 4 layers",
        ),
        ({"use_qk_norm": True}, "qk_norm", "queries and keys are normalised"),
        ({"final_logit_softcapping": 30.0}, "cap", "30"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "experts", "8, 2 for each token"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
            "shared",
            "1 for every token",
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "scoring_func": "sigmoid"},
            "sigmoid",
            "scores by sigmoid",
        ),
        (LATENT, "latent", "a latent of 64 and a key of 8 for all heads"),
        ({"attn_output_gate": True}, "gate", "the output of each head is scaled"),
        ({"partial_rotary_factor": 0.5}, "partial", "50% of the features turn"),
        ({"rotary_dim": 4}, "partial", "4 of 16 features turn"),
        ({"no_rope_layers": [1, 1, 1, 0]}, "unrotated", "1 of 4 layers do not turn"),
        (
            {"rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_theta": 1e6}}},
            "thetas",
            "theta 10,000 and 1,000,000",
        ),
        (
            {"linear_key_head_dim": 8, "layer_types": ["linear_attention"] * 3 + ["full"]},
            "delta",
            "a state in 3 of 4 layers",
        ),
        ({"mamba_d_state": 16}, "state_space", "a state of 16 for each feature"),
        ({"index_topk": 2048}, "sparse", "2048 keys for each query"),
        ({"num_nextn_predict_layers": 1}, "several", "1 more token for training"),
        ({"hc_mult": 4}, "hyper", "4 residual streams"),
        (
            {"hc_mult": 4, "hc_sinkhorn_iters": 20},
            "hyper",
            "4 residual streams, balanced in 20 rounds",
        ),
        (
            {"compress_rates": {"a": 4}, "layer_types": ["a", "b", "a", "b"]},
            "compressed",
            "4:1 in 2 of 4 layers",
        ),
        ({"index_kpool": 16}, "compressed", "one key of the indexer for 16 tokens"),
        ({"num_kv_shared_layers": 2}, "shared_keys", "the last 2 layers have none of their own"),
        ({"kv_source_layers": [0, 1, 1, 1]}, "shared_keys", "2 layers have none of their own"),
        (
            {"index_topk": 64, "indexer_types": ["full", "shared"] * 2},
            "sparse",
            "64 keys for each query, chosen in 2 of 4 layers",
        ),
        ({"n_layers_per_attn_res_block": 6}, "depth", "over blocks of 6 layers"),
        ({"loop_num_passes": 3}, "looped", "3 times"),
        ({"hidden_size_per_layer_input": 256}, "per_layer", "256 wide"),
        ({"ple_layer_ids": [3], "ngram_size": 3}, "ngrams", "of 3 tokens"),
        ({"rel_extent": 1024}, "distance", "up to 1024 tokens back"),
        (
            {"log_scaling_alpha": 0.1, "log_scaling_n_floor": 8192},
            "log_scaled",
            "by the logarithm of the position, from 8192",
        ),
        ({"swiglu_limit": 7.0}, "clamped", "gate and up within 7"),
        ({"hc_count": 2}, "hyper", "2 residual streams"),
    ],
)  # fmt: skip
def test_an_idea_is_read_from_its_keys(config: dict[str, Any], name: str, text: str) -> None:
    """Of a family that is not known; and without the key, the idea is not there."""
    assert said(**SIZES, model_type="new") == {}
    assert said(**SIZES | config, model_type="new")[name] == text


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_experts": 8, "num_experts_per_tok": 2, "is_moe": False},
        {"num_experts": "8", "num_experts_per_tok": None},
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 64, "layer_types": ["full_attention"] * 4},
        {"partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"num_nextn_predict_layers": 0},
        {"no_rope_layers": [1, 1, 1, 1]},
        {"attn_logit_softcapping": None},
        {"layer_types": "sliding_attention", "rope_parameters": 3, "no_rope_layers": None},
    ],
)
def test_a_switch_that_is_off_is_no_idea(config: dict[str, Any]) -> None:
    assert said(**SIZES | config, model_type="new") == {}


def test_a_file_wins_over_the_defaults_of_its_family() -> None:
    assert "qk_norm" in said(model_type="llama4_text")
    assert "qk_norm" not in said(model_type="llama4_text", use_qk_norm=False)
    assert said(model_type="qwen3_next")["partial"] == "25% of the features turn"
    assert said(model_type="qwen3_next", partial_rotary_factor=0.5)["partial"].startswith("50%")


def test_a_list_of_layers_belongs_to_their_number() -> None:
    """A file that has other layers, and no list, is not described by the list of the defaults."""
    config = {"model_type": "smollm3", "num_hidden_layers": 8}
    assert "no_rope_layers" not in complete(config)[0]


def test_of_a_model_for_pictures_too_the_text_counts() -> None:
    text = {"num_experts": 8, "num_experts_per_tok": 2}
    assert "experts" in said(model_type="new", text_config=text)
    outer = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 26}}
    assert "qk_norm" in {line.name for line in describe(outer)}


def test_counts_are_those_of_the_lists() -> None:
    assert counts(["qwen2", "qwen3"])["qk_norm"] == 1
    assert counts()["experts"] > 40


def test_bytes_of_caches_follow_from_a_config() -> None:
    """8 heads of 16 in 4 layers; a window that is shorter than the text; a latent; a state."""
    assert cached_numbers(SIZES, 100) == 4 * 100 * 2 * 8 * 16
    assert cached_numbers(SIZES | {"sliding_window": 10}, 100) == 4 * 10 * 2 * 8 * 16
    some = ["sliding_attention", "full_attention"] * 2
    window = {"sliding_window": 10, "layer_types": some}
    assert cached_numbers(SIZES | window, 100) == 2 * 110 * 2 * 8 * 16
    assert cached_numbers(SIZES | {"kv_lora_rank": 64, "qk_rope_head_dim": 8}, 100) == 4 * 100 * 72
    assert cached_numbers({"model_type": "deepseek_v3"}, 1) == 61 * 576
    assert cached_numbers({"model_type": "qwen3_next"}, 1) == 12 * 2 * 2 * 256
    assert states(SIZES) == 0
    assert states({"model_type": "qwen3_next"}) == 36 * (32 * 128 * 128 + 8192 * 4)
    wide = {k: v for k, v in SIZES.items() if k != "head_dim"}
    assert cached_numbers(wide | {"hidden_size": 128}, 100) == cached_numbers(SIZES, 100)
    for config in ({"model_type": "new"}, wide):
        with pytest.raises(ValueError, match="must have num_hidden_layers, num_attention_heads"):
            cached_numbers(config, 1)


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        ({"num_kv_shared_layers": 3}, 1),
        ({"kv_source_layers": [0, 0, 2, 2]}, 2),
        ({"layer_types": ["full_attention", "mlp", "linear_attention", "moe"]}, 1),
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, 1),
        ({"n_input_layers": 1, "n_recurrent_layers": 2, "n_recurrent_loops": 3}, 8),
        ({"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 3}, 6),
        ({"per_layer_config": {"03": {"num_key_value_heads": 16}}}, 5),
        ({"v_head_dim": 32}, 6),
    ],
)
def test_a_layer_keeps_its_own_keys_those_of_each_pass_or_none(
    config: dict[str, Any], caches: int
) -> None:
    """Of 4 layers; keys and values of 100 tokens and 8 heads in each."""
    assert cached_numbers(SIZES | config, 100) == caches * 100 * 2 * 8 * 16


def test_an_indexer_has_keys_of_its_own_in_the_layers_that_choose() -> None:
    latent = SIZES | {"kv_lora_rank": 64, "qk_rope_head_dim": 8, "index_head_dim": 32}
    assert cached_numbers(latent, 100) == 4 * 100 * (72 + 32)
    shared = latent | {"indexer_types": ["full", "shared"] * 2}
    assert cached_numbers(shared, 100) == 100 * (4 * 72 + 2 * 32)
    assert cached_numbers(latent | {"index_kpool": 10}, 100) == 4 * (100 * 72 + 10 * 32)
    bare = latent | {"no_rope_layers": [1, 1, 1, 0]}
    assert cached_numbers(bare, 100) == 100 * (4 * (64 + 32) + 3 * 8)


def test_vectors_that_stand_for_several_tokens_are_counted_as_what_they_are() -> None:
    """DeepSeek-V4: 20 layers keep a vector of 512 and an indexer's key of 128 for every 4 tokens,
    23 a vector for every 128, and all 43 a window of 128 vectors."""
    T = 2**20
    want = 20 * T // 4 * 640 + 23 * T // 128 * 512 + 43 * 128 * 512
    assert cached_numbers({"model_type": "deepseek_v4"}, T) == want


#: What a file may hold instead of what is expected.
ODD = [None, True, -1, 10**9, 10**30, float("nan"), "\x1b[31m\n", ["\x1b[31m"], {"a": None}, [[]]]


@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v4", "gemma3_text"])
def test_whatever_a_key_holds_a_config_is_described_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, file = time.monotonic(), tmp_path / "config.json"
    for key in families()[name].config:
        for odd in ODD:
            config = {**families()[name].config, key: odd}
            for count in (lambda c: cached_numbers(c, 10**6), states):
                with contextlib.suppress(ValueError):
                    count(config)
            describe(config)
    file.write_text(json.dumps({key: "\x1b[31m\n" for key in families()[name].config}))
    assert main(["describe", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "\\x1b[31m" in out and all(line.isprintable() for line in out.splitlines()) and not err
    assert time.monotonic() - start < 30


#: Of a token in bfloat16, at the published size.
BYTES = {
    "Qwen2-7B": (Qwen2Config(**qwen2.SIZES["Qwen2-7B"]), 57_344),
    "Qwen3-8B": (Qwen3Config(**qwen3.SIZES["Qwen3-8B"]), 147_456),
    "Qwen3-235B-A22B": (Qwen3MoeConfig(**qwen3_moe.SIZES["Qwen3-235B-A22B"]), 192_512),
    "SmolLM3-3B": (SmolLM3Config(), 73_728),
    "Qwen3-Next-80B-A3B": (Qwen3NextConfig(), 24_576),
    "DeepSeek-V3": (DeepseekV3Config(), 70_272),
}


@pytest.mark.parametrize("name", BYTES)
@torch.no_grad()
def test_a_cache_at_a_published_size_takes_what_the_config_says(name: str) -> None:
    """A real one, of four layers with the published widths, on a device that holds no numbers."""
    config, per_token = BYTES[name]
    assert 2 * cached_numbers(config_to_dict(config), 1) == per_token
    few = replace(config, n_layer=4, layer_types=None, **{
        key: None for key in ("rope_layers",) if hasattr(config, key)
    })  # fmt: skip
    with torch.device("meta"):
        model = build(few).bfloat16()
        for block in model.backbone.layers:
            block.mlp = torch.nn.Identity()  # routing needs numbers
        cache = cache_for(few.windows, reserve=16)
        model(torch.zeros(1, 16, dtype=torch.long), cache=cache)
    of_keys = cache.nbytes - cache.state_nbytes
    assert of_keys == 2 * cached_numbers(config_to_dict(few), 16)
    assert of_keys * config.n_layer == 16 * per_token * 4


def test_what_is_no_config_is_refused() -> None:
    with pytest.raises(ValueError, match="a config is a dictionary, not a list"):
        describe([])  # type: ignore[arg-type]


def test_the_command_reads_a_folder_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt_oss"}))
    for path in (tmp_path, file):
        assert main(["describe", str(path)]) == 0
        out = capsys.readouterr().out
        assert "Sinks: a learned number for each head [no key: its code]" in out
        assert "-> 9_since_qwen2/4_sinks_and_gates" in out and "not known here" not in out
        assert out.endswith("cache of 32,768 tokens in 16 bits: 1,213 MB\n")
    file.write_text(json.dumps({"model_type": "new", **SIZES, "index_topk": 4}))
    assert main(["describe", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4 keys for each query [index_topk]" in out and "not known here" in out
    file.write_text("[]")
    assert main(["describe", str(tmp_path)]) == 2
    assert main(["describe", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
