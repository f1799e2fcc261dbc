"""Files that say what cannot be: one line with the file, before anything is built.

test_damaged_files.py tries thousands of them.
"""

import json
import math
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint import weights
from lm_from_scratch.checkpoint.folders import read_json
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.commands.classify import line_of
from lm_from_scratch.models.deepseek_v4 import DeepseekV4Config, DeepseekV4ForCausalLM
from lm_from_scratch.models.heads import SequenceClassifier

Folders = dict[str, Path]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("sound")
    save_pretrained(tiny_gpt2(), root / "gpt2", max_shard_bytes=20_000)
    save_pretrained(tiny_qwen2(), root / "qwen2")
    save_pretrained(SequenceClassifier(tiny_gpt2().backbone, 3), root / "labels")
    return {folder.name: folder for folder in root.iterdir()}


def copied(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to / "m")
    path = to / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to / "m"


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt2", "activation_function", []),
        ("gpt2", "activation_function", {"a": 1}),
        ("gpt2", "activation_function", 5),
        ("gpt2", "architectures", 5),
        ("gpt2", "architectures", "GPT2LMHeadModel"),
        ("gpt2", "architectures", [["GPT2LMHeadModel"]]),
        ("gpt2", "model_type", ["gpt2"]),
        ("gpt2", "eos_token_id", []),
        ("gpt2", "eos_token_id", [[2]]),
        ("gpt2", "bos_token_id", [2]),
        ("gpt2", "n_layer", 10**30),
        ("gpt2", "n_head", None),
        ("gpt2", "vocab_size", [97]),
        ("gpt2", "embd_pdrop", "0.1"),
        ("gpt2", "layer_norm_epsilon", math.nan),
        ("gpt2", "initializer_range", 10**400),
        ("gpt2", "scale_attn_weights", []),
        ("gpt2", "quantization_config", [1]),
        ("labels", "id2label", ["a"]),
        ("labels", "id2label", {"a": "b"}),
        ("labels", "id2label", 3),
        ("labels", "num_labels", []),
        ("qwen2", "rope_parameters", {"rope_type": ["yarn"]}),
        ("qwen2", "rope_parameters", {"rope_type": None}),
        ("qwen2", "rope_parameters", {"rope_type": "yarn", "rope_theta": []}),
        ("qwen2", "rope_parameters", {"rope_type": "yarn", "original_max_position_embeddings": ""}),
        ("qwen2", "rope_parameters", {"partial_rotary_factor": []}),
        ("qwen2", "rope_scaling", [1]),
        ("qwen2", "max_position_embeddings", "128"),
        ("qwen2", "layer_types", 5),
        ("qwen2", "layer_types", [[], 1]),
        ("qwen2", "use_sliding_window", "false"),
        ("qwen2", "hidden_size", "long " * 10**5),
        ("qwen2", "num_hidden_layers", list(range(10**5))),
    ],
)
def test_an_odd_value_is_refused_in_one_line_with_file_and_key(
    family: str, key: str, value: Any, sound: Folders, tmp_path: Path
) -> None:
    folder = copied(sound[family], tmp_path, **{key: value})
    read = classifier_from_pretrained if family == "labels" else from_pretrained
    with pytest.raises(ValueError) as refused:
        read(folder)
    message = str(refused.value)
    assert "\n" not in message and len(message) < 800
    assert str(folder) in message
    inner = value if key == "rope_parameters" else {}
    assert any(name in message for name in [key, *inner])


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_layer": 2**16}, "n_layer=65536 in config.json, but the weights have 3"),
        (
            "qwen2",
            {"num_hidden_layers": 2**16, "layer_types": None},
            "n_layer=65536 .* the weights have 3 layers",
        ),
        ("gpt2", {"n_embd": 10**9}, r"wte.weight has shape \(97, 28\), not \(97, 1000000000\)"),
        ("gpt2", {"vocab_size": 10**9}, r"has shape \(97, 28\), not \(1000000000, 28\)"),
        ("qwen2", {"hidden_size": 6 * 10**8}, r"shape \(97, 48\), not \(97, 600000000\)"),
    ],
)
def test_sizes_are_compared_before_anything_is_built(
    family: str, changes: dict[str, int], message: str, sound: Folders, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(weights, "build", lambda config: pytest.fail("built"))
    with pytest.raises(ValueError, match=message):
        from_pretrained(copied(sound[family], tmp_path, **changes))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"n_positions": 10**9}, r"wpe.weight has shape \(64, 28\), not \(1000000000, 28"),
        ("gpt2", {"n_inner": 10**9}, r"c_fc.weight has shape \(112, 28\), not \(1000000000, 28"),
        ("gpt2", {"n_inner": 10**18}, "intermediate_size=10+ is larger than any tensor"),
        ("qwen2", {"intermediate_size": 10**9}, r"has shape \(56, 48\), not \(1000000000, 48\)"),
        ("qwen2", {"head_dim": 10**9}, r"has shape \(48, 48\), not \(6000000000, 48\)"),
        ("qwen2", {"head_dim": 2 * 10**9, "intermediate_size": 2 * 10**9}, "has shape"),
        ("gpt2", {"n_inner": 10**30}, "intermediate_size=10+ is larger than any tensor"),
    ],
)
def test_other_sizes_take_no_memory(
    family: str, changes: dict[str, int], message: str, sound: Folders, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        from_pretrained(copied(sound[family], tmp_path, **changes))


def test_labels_that_the_weights_do_not_have_take_no_memory(sound: Folders, tmp_path: Path) -> None:
    changes = {"id2label": None, "label2id": None, "num_labels": 2 * 10**9}
    folder = copied(sound["labels"], tmp_path, **changes)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"score.weight has shape \(3, 28\), not \(2000000000, 28"):
        classifier_from_pretrained(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**7


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a":' + "[" * 900 + "]" * 900 + "}", "1" * 5000]
)
def test_what_is_nested_too_deep_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is (not valid JSON|nested more than)"):
        read_json(tmp_path / "config.json")


def test_shards_and_their_index_agree(sound: Folders, tmp_path: Path) -> None:
    folder = copied(sound["gpt2"], tmp_path)
    index = folder / "model.safetensors.index.json"
    contents = json.loads(index.read_text())
    places = contents["weight_map"]
    name = "transformer.ln_f.bias"
    other = next(file for file in places.values() if file != places[name])
    want = from_pretrained(folder)(token_ids(1, 5))

    for changed, message in [
        ({name: other}, f"places '{name}' in {other}, but {places[name]} holds it"),
        ({"h.9.x": other}, "names 'h.9.x', which no shard holds"),
        ({name: [other]}, "no shard "),
        ({name: "config.json/../" + other}, "no shard "),
        ({name: str(folder / other)}, "no shard "),
    ]:
        index.write_text(json.dumps({**contents, "weight_map": places | changed}))
        with pytest.raises(ValueError) as refused:
            from_pretrained(folder)
        assert message in str(refused.value)
    index.write_text(json.dumps(contents))
    assert torch.equal(from_pretrained(folder)(token_ids(1, 5)), want)
    tensors = load_file(folder / other)
    save_file({**tensors, name: torch.zeros(28)}, folder / other)
    with pytest.raises(ValueError, match=f"places '{name}' in {places[name]}, but {other} holds"):
        from_pretrained(folder)
    index.write_text(json.dumps({"weight_map": {n: f for n, f in places.items() if n != name}}))
    with pytest.raises(ValueError, match=f"holds '{name}', as another shard does"):
        from_pretrained(folder)


ESCAPE = "\x1b[2J\x1b[31m\rred\nline"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {"model_type": ESCAPE}),
        ("qwen2", {"architectures": [ESCAPE + "ForAnyClassification"]}),
        ("qwen2", {"layer_types": [ESCAPE] * 3}),
        ("qwen2", {"rope_parameters": {"rope_type": ESCAPE}}),
        ("qwen2", {"rope_parameters": {ESCAPE: {}}}),
        ("qwen2", {"quantization_config": {"format": "lm_from_scratch", "int8": {ESCAPE: 1}}}),
        ("gpt2", {"activation_function": ESCAPE}),
        ("qwen2", {}),  # and a tensor of that name
    ],
)
def test_what_a_file_says_moves_no_cursor(
    family: str, changes: dict[str, Any], sound: Folders, tmp_path: Path, capsys: Any
) -> None:
    folder = copied(sound[family], tmp_path, **changes)
    if not changes:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {ESCAPE: torch.zeros(1)}, folder / "model.safetensors")
    assert main(["generate", "--model", str(folder), "--prompt", "a"]) == 2
    out, err = capsys.readouterr()
    assert err.removesuffix("\n").isprintable() and "\\x1b" in err and not out


def test_the_name_of_a_label_moves_no_cursor() -> None:
    line = line_of(torch.tensor([0.0, 9.0]), ["a", ESCAPE], None)
    assert line.partition("\t")[0] == r"\x1b[2J\x1b[31m\rred\nline"


@torch.no_grad()
def test_a_table_of_experts_may_have_32_bits_and_names_only_those_there_are(
    tmp_path,
) -> None:
    config = DeepseekV4Config(
        vocab_size=97, n_layer=1, n_head=2, n_embd=16, head_dim=16, partial_rotary_factor=0.25,
        layer_types=("sliding_attention",), q_lora_rank=8, o_groups=2, o_lora_rank=4,
        sliding_window=4, index_head_dim=8, hc_mult=2, n_expert=3, top_k=2, expert_size=4,
    )  # fmt: skip
    model, idx = DeepseekV4ForCausalLM(config).eval(), torch.arange(9)[None]
    save_pretrained(model, tmp_path / "v4")
    file, name = tmp_path / "v4" / "model.safetensors", "model.layers.0.ffn.gate.tid2eid"
    tensors = load_file(file)
    save_file(tensors | {name: tensors[name].int()}, file, {"format": "pt"})
    assert torch.equal(from_pretrained(tmp_path / "v4")(idx), model(idx))
    for change in (1, -1):
        save_file(tensors | {name: tensors[name] + change}, file, {"format": "pt"})
        with pytest.raises(ValueError, match="tid2eid names experts that are not among the 3"):
            from_pretrained(tmp_path / "v4")
