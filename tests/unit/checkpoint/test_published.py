"""published.py: a folder of `transformers` is opened as it is, and comes back with nothing lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import enlarge_, tiny_gpt2, tiny_qwen2, token_ids

from lm_from_scratch.checkpoint.configs import config_from_dict
from lm_from_scratch.checkpoint.published import end_tokens, labels
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    load_checkpoint,
    save_pretrained,
)
from lm_from_scratch.layers.activation import ACTIVATIONS
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.text.tokenizer import Tokenizer

GPT2 = dict(
    vocab_size=97, n_positions=64, n_layer=3, n_head=4, n_embd=28,
    embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
QWEN2 = dict(
    vocab_size=97, max_position_embeddings=128, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, hidden_size=48, intermediate_size=56,
)  # fmt: skip
FAMILIES = {"GPT2": GPT2, "Qwen2": QWEN2}
HEADS = {"GPT2": "LMHeadModel", "Qwen2": "ForCausalLM"}
IDX = token_ids(2, 9)
NOWHERE = (-1, 151643)  # tokens that no small vocabulary has

#: Odd settings that are legal: all of them must open, and come back.
ODD: dict[str, tuple[str, dict[str, Any]]] = {
    "the default ids and a small vocabulary": ("GPT2", {}),
    "a padding token": ("GPT2", {"pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2}),
    "several ends": ("GPT2", {"eos_token_id": [2, 96, 50256], "bos_token_id": None}),
    "swish": ("GPT2", {"activation_function": "swish", "n_inner": 50}),
    "the tanh GELU of torch": ("GPT2", {"activation_function": "gelu_pytorch_tanh"}),
    "keys of a task": ("GPT2", {"task_specific_params": {"a": {"b": [1, None]}}, "author": "me"}),
    "padding above the vocabulary": ("Qwen2", {"pad_token_id": 151643}),
    "padding below zero": ("Qwen2", {"pad_token_id": -1}),
    "several ends of Qwen2": ("Qwen2", {"eos_token_id": [7, 9], "bos_token_id": 151643}),
    "no ids": ("Qwen2", {"eos_token_id": None, "bos_token_id": None}),
    "an own width of heads": ("Qwen2", {"head_dim": 12, "tie_word_embeddings": True}),
    "a window": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    ),
    "a window that no layer uses": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4}),
    "a window that is off": ("Qwen2", {"sliding_window": 4, "max_window_layers": 2}),
    "yarn": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e5,
                             "original_max_position_embeddings": 64}},
    ),
    "a quick GELU": ("Qwen2", {"hidden_act": "quick_gelu"}),
}  # fmt: skip


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Up to float32's rounding at the size of the largest logit."""
    bound = 4e-6 * theirs.abs().max().item()
    torch.testing.assert_close(ours, theirs, atol=bound, rtol=0)


def made(
    folder: Path, family: str, head: str = "", dtype: torch.dtype | None = None, **settings: Any
) -> torch.nn.Module:
    """A model of transformers, written to a folder; as transformers reads it from there."""
    kind = getattr(transformers, f"{family}{head or HEADS[family]}")
    pad = settings.get("pad_token_id")
    if pad in NOWHERE:  # what files hold, and the embedding of transformers refuses
        del settings["pad_token_id"]
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **settings})
    model = kind(config).eval()
    enlarge_(model)
    model.to(dtype).save_pretrained(folder)
    if pad in NOWHERE:
        edit(folder, pad_token_id=pad)
    return model


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    contents = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(contents | changes))


def read(folder: Path, file: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / file).read_text())


def comes_back(model: Any, folder: Path, again: Path) -> None:
    """What is read and written again says the same, key for key."""
    save_pretrained(model, again, published=load_checkpoint(folder).published)
    assert read(again) == read(folder)
    generation = "generation_config.json"
    assert (again / generation).exists() == (folder / generation).exists()
    if (folder / generation).exists():
        assert read(again, generation) == read(folder, generation)


@torch.no_grad()
@pytest.mark.parametrize("name", ODD)
def test_odd_settings_open_and_come_back(name: str, tmp_path: Path) -> None:
    family, settings = ODD[name]
    theirs = made(tmp_path / "theirs", family, **settings)
    ours = from_pretrained(tmp_path / "theirs")
    near(ours(IDX), theirs(IDX).logits)
    comes_back(ours, tmp_path / "theirs", tmp_path / "ours")
    if settings.get("pad_token_id") not in NOWHERE:
        kind = getattr(transformers, f"{family}{HEADS[family]}")
        again = kind.from_pretrained(tmp_path / "ours").eval()
        first = kind.from_pretrained(tmp_path / "theirs")
        assert again.config.to_diff_dict() == first.config.to_diff_dict()
        assert again.generation_config.to_dict() == theirs.generation_config.to_dict()
        assert torch.equal(again(IDX).logits, theirs(IDX).logits)


DEFAULT = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "removed", "changes"),
    [
        ("GPT2", ["n_head"], {"num_attention_heads": 2}),
        ("GPT2", [], {"num_attention_heads": 2}),  # which goes before n_head
        ("GPT2", ["n_embd", "n_layer"], {"hidden_size": 28, "num_hidden_layers": 3}),
        ("GPT2", ["n_positions"], {"max_position_embeddings": 64}),
        ("Qwen2", [], {"rope_parameters": DEFAULT, "rope_scaling": YARN | {"rope_theta": 500.0}}),
        ("Qwen2", [], {"rope_parameters": DEFAULT, "rope_scaling": YARN, "rope_theta": 1e6}),
        ("Qwen2", [], {"rope_parameters": DEFAULT, "rope_scaling": {}}),
        (
            "Qwen2",
            [],
            {
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0},
                "original_max_position_embeddings": 16,
            },
        ),
        (
            "Qwen2",
            ["rope_parameters"],
            {"rope_scaling": YARN, "original_max_position_embeddings": 8},
        ),
        (
            "Qwen2",
            ["rope_parameters"],
            {"rope_scaling": YARN | {"type": "linear"}, "original_max_position_embeddings": 8},
        ),
    ],
)
def test_keys_under_other_names_mean_what_they_mean_to_transformers(
    family: str, removed: list[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    made(tmp_path / "m", family, eos_token_id=2, bos_token_id=1)
    contents = {key: value for key, value in read(tmp_path / "m").items() if key not in removed}
    (tmp_path / "m" / "config.json").write_text(json.dumps(contents | changes))
    kind = getattr(transformers, f"{family}{HEADS[family]}")
    theirs = kind.from_pretrained(tmp_path / "m").eval()
    ours = from_pretrained(tmp_path / "m")
    idx = token_ids(2, 40)
    near(ours(idx), theirs(idx).logits)
    comes_back(ours, tmp_path / "m", tmp_path / "again")


def test_a_theta_that_a_second_dictionary_would_hide_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "m", "Qwen2", rope_parameters=DEFAULT)
    edit(tmp_path / "m", rope_scaling=YARN)  # transformers would take 10000 for theta
    with pytest.raises(
        ValueError, match=r"config\.json: rope_scaling=.* rope_theta=1000000\.0 must"
    ):
        from_pretrained(tmp_path / "m")


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
@pytest.mark.parametrize("n_labels", [1, 2, 3])
def test_a_classifier_keeps_its_labels_and_its_padding(
    family: str, kind: str, n_labels: int, tmp_path: Path
) -> None:
    names = dict(enumerate(["good", "bad", "ugly"][:n_labels]))
    settings: dict[str, Any] = dict(
        id2label=names, label2id={name: i for i, name in names.items()}, pad_token_id=0,
        problem_type="multi_label_classification", eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    if kind == "Token":
        settings["classifier_dropout"] = 0.3
    head = f"For{kind}Classification"
    theirs = made(tmp_path / "theirs", family, head, **settings)
    checkpoint = load_checkpoint(tmp_path / "theirs")
    ours = checkpoint.model
    assert labels(ours, checkpoint.published) == list(names.values())
    near(ours(IDX), theirs(IDX).logits)
    comes_back(ours, tmp_path / "theirs", tmp_path / "ours")
    again = getattr(transformers, family + head).from_pretrained(tmp_path / "ours").eval()
    assert again.config.id2label == names and again.config.pad_token_id == 0
    logits = again(IDX).logits  # of two rows, which want a padding token
    torch.testing.assert_close(logits, theirs(IDX).logits, atol=1e-5, rtol=0)


def test_what_changed_since_is_written(tmp_path: Path) -> None:
    made(tmp_path / "m", "Qwen2", "ForTokenClassification", id2label={0: "a", 1: "b"}, author="me")
    checkpoint = load_checkpoint(tmp_path / "m")
    backbone, published = checkpoint.model.backbone, checkpoint.published
    for ours in (TokenClassifier(backbone, 3, 0.2), SequenceClassifier(backbone, 3)):
        save_pretrained(ours, tmp_path / "again", published=published)
        contents = read(tmp_path / "again")
        assert contents["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
        assert contents["author"] == "me"
        again = load_checkpoint(tmp_path / "again")
        assert labels(again.model, again.published) == labels(ours, published)
        assert contents["architectures"] == [f"Qwen2For{type(ours).__name__[:-10]}Classification"]
    assert read(tmp_path / "m")["architectures"] == ["Qwen2ForTokenClassification"]
    half = classifier_from_pretrained(tmp_path / "m").half()
    save_pretrained(half, tmp_path / "half", published=published)
    assert read(tmp_path / "half") == read(tmp_path / "m") | {"dtype": "float16"}


def test_a_number_of_labels_without_names(tmp_path: Path) -> None:
    ours = SequenceClassifier(tiny_qwen2().backbone, 5)
    save_pretrained(ours, tmp_path / "m")
    contents = read(tmp_path / "m")
    del contents["id2label"], contents["label2id"]
    (tmp_path / "m" / "config.json").write_text(json.dumps({**contents, "num_labels": 5}))
    again = load_checkpoint(tmp_path / "m")
    assert labels(again.model, again.published) == labels(ours) == [f"LABEL_{i}" for i in range(5)]


OLD = {  # as transformers 4.42 wrote it, for these sizes
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
    "intermediate_size": 56, "max_position_embeddings": 128, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 6, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "float32",
    "transformers_version": "4.42.4", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 97,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        {"torch_dtype": "bfloat16", "tie_word_embeddings": False},
    ],
)
def test_a_folder_of_transformers_4_42(changes: dict[str, Any], tmp_path: Path) -> None:
    contents = OLD | changes
    model = tiny_qwen2(tie_word_embeddings=contents["tie_word_embeddings"])
    dtype = getattr(torch, contents["torch_dtype"])
    save_pretrained(model.to(dtype), tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(contents))
    theirs = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "m").eval()
    ours = from_pretrained(tmp_path / "m")
    bound = 5e-5 if dtype == torch.float32 else 1.0
    torch.testing.assert_close(ours(IDX), theirs(IDX).logits, atol=bound, rtol=0)
    comes_back(ours, tmp_path / "m", tmp_path / "again")
    published = load_checkpoint(tmp_path / "m").published
    save_pretrained(ours.double(), tmp_path / "double", published=published)
    assert read(tmp_path / "double") == contents | {"torch_dtype": "float64"}


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_have_the_names_of_transformers(name: str, tmp_path: Path) -> None:
    x = torch.linspace(-6, 6, 401, dtype=torch.float64)
    theirs = transformers.activations.ACT2FN[name](x)
    torch.testing.assert_close(ACTIVATIONS[name](x), theirs, atol=1e-9, rtol=0)
    for family, key in (("gpt2", "activation_function"), ("qwen2", "hidden_act")):
        contents = {"model_type": family, key: name}
        assert config_from_dict(contents).activation == name
    save_pretrained(tiny_qwen2(activation=name), tmp_path / "m")
    assert read(tmp_path / "m")["hidden_act"] == name


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float32"}, torch.float32),
        ({"dtype": None}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_weights_of_several_dtypes_become_one(
    family: str, said: dict[str, Any], want: torch.dtype, tmp_path: Path
) -> None:
    made(tmp_path / "m", family, eos_token_id=2, bos_token_id=1)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    for name in sorted(tensors)[::2]:
        tensors[name] = tensors[name].bfloat16()
    embedding = next(n for n in tensors if n.endswith(("wte.weight", "embed_tokens.weight")))
    tensors[embedding] = tensors[embedding].bfloat16().to(torch.float32)
    if family == "GPT2":  # a stored head in another dtype is the embedding all the same
        tensors["lm_head.weight"] = tensors[embedding].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    edit(tmp_path / "m", **said)
    ours = from_pretrained(tmp_path / "m")
    assert {p.dtype for p in ours.parameters()} == {want}
    if said["dtype"] not in (None, "auto"):
        kind = getattr(transformers, f"{family}{HEADS[family]}")
        theirs = kind.from_pretrained(tmp_path / "m").eval()
        assert {p.dtype for p in theirs.parameters()} == {want}
        bound = 5e-5 if want == torch.float32 else 1.0
        torch.testing.assert_close(ours(IDX), theirs(IDX).logits, atol=bound, rtol=0)
    save_pretrained(ours, tmp_path / "again")
    assert read(tmp_path / "again")["dtype"] == str(want).removeprefix("torch.")


CONSTANTS = {
    "GPT2": {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64).tril().bool(),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    },
    "Qwen2": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)},
}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_constants_that_are_dropped_have_no_say_in_the_dtype(family: str, tmp_path: Path) -> None:
    made(tmp_path / "m", family, dtype=torch.bfloat16, eos_token_id=2, bos_token_id=1)
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file) | CONSTANTS[family]
    save_file(tensors, file, metadata={"format": "pt"})
    edit(tmp_path / "m", dtype=None)
    ours = from_pretrained(tmp_path / "m")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    norm = next(name for name in tensors if name.endswith(("ln_1.weight", "layernorm.weight")))
    save_file(tensors | {norm: tensors[norm].float()}, file, metadata={"format": "pt"})
    edit(tmp_path / "m", dtype="bfloat16")
    kind = getattr(transformers, f"{family}{HEADS[family]}")
    theirs = kind.from_pretrained(tmp_path / "m").eval().float()
    ours = from_pretrained(tmp_path / "m").float()
    near(ours(IDX), theirs(IDX).logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_a_classifier_has_no_head_that_could_be_untied(kind: str, tmp_path: Path) -> None:
    settings = dict(tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    theirs = made(tmp_path / "m", "GPT2", f"For{kind}Classification", **settings)
    ours = classifier_from_pretrained(tmp_path / "m")
    near(ours(IDX), theirs(IDX).logits)
    comes_back(ours, tmp_path / "m", tmp_path / "again")


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        (2, None, [2]),
        ([7, 9], None, [7, 9]),
        ([7, 50256], None, [7]),
        (2, {"eos_token_id": [5, 6, 97]}, [5, 6]),
        (2, {"eos_token_id": 5}, [5]),
        (2, {"eos_token_id": None}, [2]),
        (2, {"temperature": 0.7}, [2]),
        (2, {"eos_token_id": 151645}, [2]),
        (50256, None, [0]),
        (None, {}, [0]),
    ],
)
def test_the_checkpoint_says_where_a_text_ends(
    config: Any, generation: dict[str, Any] | None, want: list[int], tmp_path: Path
) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m")
    edit(tmp_path / "m", eos_token_id=config)
    if generation is not None:
        edit(tmp_path / "m", "generation_config.json", **generation)
    checkpoint, tokenizer = load_checkpoint(tmp_path / "m"), Tokenizer.train(["some text"], 257)
    model, published = checkpoint.model, checkpoint.published
    assert tokenizer.eos_token_id == 0 and end_tokens(model, tokenizer, published) == want
    assert end_tokens(model, published=published) == [n for n in want if n]


def test_a_model_that_was_made_here() -> None:
    assert end_tokens(tiny_gpt2()) == [2]
    assert end_tokens(tiny_qwen2(eos_token_id=(4, 5))) == [4, 5]
    assert end_tokens(tiny_gpt2(eos_token_id=None)) == []


@pytest.mark.parametrize("ids", ["2", [], [2, "3"], {}, True, 2.5, [[2]]])
def test_a_generation_config_that_names_no_token_is_refused(ids: Any, tmp_path: Path) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m")
    edit(tmp_path / "m", "generation_config.json", eos_token_id=ids)
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id="):
        from_pretrained(tmp_path / "m")
