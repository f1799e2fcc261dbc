"""checkpoint: both ways with transformers, and nothing half-loaded.

A G and a number in a name is a mistake of a real program; the pages use the same numbers.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import enlarge_, tiny_gpt2, tiny_hf, tiny_hf_qwen2, tiny_qwen2, token_ids
from torch import nn

from lm_from_scratch.checkpoint import state, tensors
from lm_from_scratch.checkpoint.architectures import build
from lm_from_scratch.checkpoint.configs import config_from_dict, config_to_dict
from lm_from_scratch.checkpoint.dialects import DIALECTS
from lm_from_scratch.checkpoint.names import WRAPPER
from lm_from_scratch.checkpoint.published import Published
from lm_from_scratch.checkpoint.state import (
    latest_checkpoint,
    load_training_state,
    save_training_state,
)
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    load_checkpoint,
    save_pretrained,
)
from lm_from_scratch.layers.rope_scaling import DynamicNTKScaling
from lm_from_scratch.models.deepseek_v3 import DeepseekV3Config
from lm_from_scratch.models.gpt2 import GPT2LMHeadModel
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.optim.adamw import AdamW
from lm_from_scratch.text.tokenizer import Tokenizer


@pytest.fixture
def folder(tmp_path) -> Path:
    tiny_hf().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def test_shards_in_both_directions(tmp_path) -> None:
    from transformers import GPT2LMHeadModel as HFModel

    idx = token_ids(2, 12)
    twin = tiny_hf()
    twin.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    ours = from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(ours(idx), twin(idx).logits, atol=5e-5, rtol=0)
    save_pretrained(ours, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = HFModel.from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(idx).logits, ours(idx), atol=5e-5, rtol=0)
    assert torch.equal(from_pretrained(tmp_path / "ours")(idx), ours(idx))


def test_names_without_prefix_and_constant_masks_load(folder) -> None:
    """The layout of the first published files."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        for layer in range(3):
            tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
            tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    edit_tensors(folder, edit)
    idx = token_ids(2, 12)
    torch.testing.assert_close(
        from_pretrained(folder)(idx), tiny_hf()(idx).logits, atol=5e-5, rtol=0
    )


def test_the_constants_that_are_dropped_are_not_the_biases(folder) -> None:
    """A filter on ``attn.bias`` at the end of a name drops ``c_attn.bias`` too."""
    ours = from_pretrained(folder).state_dict()
    assert (ours["transformer.h.1.attn.c_attn.bias"] != 0).all()
    edit_tensors(folder, lambda t: t.pop("transformer.h.1.attn.c_attn.bias"))
    with pytest.raises(ValueError, match=r"missing transformer\.h\.1\.attn\.c_attn\.bias"):
        from_pretrained(folder)


def test_a_stored_head_must_be_the_embedding(folder) -> None:
    embedding = load_file(folder / "model.safetensors")["transformer.wte.weight"]
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    from_pretrained(folder)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        from_pretrained(folder)


def test_everything_wrong_is_named_at_once(folder) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("transformer.ln_f.bias")
        tensors["transformer.extra"] = torch.zeros(1)
        tensors["transformer.wpe.weight"] = torch.zeros(63, 28)

    edit_tensors(folder, edit)
    with pytest.raises(ValueError) as error:
        from_pretrained(folder)
    for part in (
        "missing transformer.ln_f.bias",
        "unexpected transformer.extra",
        "transformer.wpe.weight has shape (63, 28), not (64, 28)",
    ):
        assert part in str(error.value)


def test_numbers_and_integers_in_one_checkpoint_are_refused(folder) -> None:
    edit_tensors(
        folder, lambda t: t.update({"transformer.ln_f.bias": torch.zeros(28, dtype=torch.long)})
    )
    with pytest.raises(ValueError, match="different dtypes"):
        from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 7, 100, 5000])
def test_a_truncated_file_is_refused(folder, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged or incomplete"):
        from_pretrained(folder)


def test_missing_files_are_named(folder, tmp_path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"'pytorch_model.bin' is pickled .* writes safetensors"):
        from_pretrained(folder)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"has neither .* are not read"):
        from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        from_pretrained(folder)
    with pytest.raises(ValueError, match="no folder"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no folder here, and the hub gave no model of that name"):
        from_pretrained("nobody/nothing-of-this-name")


def test_a_missing_shard_is_named(tmp_path) -> None:
    tiny_hf().save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"no shard '{shard.name}'"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"n_head": 5}, "n_embd=28 is not a multiple of n_head=5"),
        ({"activation_function": "mish"}, "activation='mish'"),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused(folder, change, message) -> None:
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


def test_config_round_trip_and_unknown_keys() -> None:
    config = tiny_gpt2(intermediate_size=50, activation="relu").config
    assert config_from_dict(config_to_dict(config) | {"task_specific_params": {}}) == config


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_of_the_file_is_kept(tmp_path, dtype) -> None:
    model = tiny_gpt2().to(dtype)
    save_pretrained(model, tmp_path / "m")
    again = from_pretrained(tmp_path / "m")
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] in str(dtype)


def test_a_loaded_model_does_not_share_storage_with_the_file(folder) -> None:
    model = from_pretrained(folder)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert all((p != 0).any() for p in from_pretrained(folder).parameters())


def test_saving_replaces_a_model_whole_and_refuses_anything_else(tmp_path) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m", max_shard_bytes=20_000)
    save_pretrained(tiny_gpt2(seed=1), tmp_path / "m")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds other files too: \['chapter1.txt'\]"):
        save_pretrained(tiny_gpt2(), tmp_path / "thesis")
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"


def test_saving_into_a_folder_loses_no_tokenizer_and_nothing_of_how_texts_go_on(tmp_path) -> None:
    """Both belong to the folder, not to the model: they stay where they are not given anew."""
    first, second = (Tokenizer.train([text], 270) for text in ("some text", "other words"))
    published = Published(generation_config={"eos_token_id": 5})
    save_pretrained(tiny_gpt2(), tmp_path / "m", first, published=published)
    (tmp_path / "m" / "additional_chat_templates").mkdir()
    (tmp_path / "m" / "additional_chat_templates" / "tool.jinja").write_text("{{ 1 }}")
    before = {p: p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()}
    save_pretrained(from_pretrained(tmp_path / "m"), tmp_path / "m")
    assert {p: p.read_bytes() for p in (tmp_path / "m").rglob("*") if p.is_file()} == before
    checkpoint = load_checkpoint(tmp_path / "m")
    save_pretrained(
        tiny_gpt2(seed=1),
        tmp_path / "m",
        second,
        published=replace(checkpoint.published, generation_config={}),
    )
    assert Tokenizer.load(tmp_path / "m").encode("words") == second.encode("words")
    assert not (tmp_path / "m" / "generation_config.json").exists()
    assert not (tmp_path / "m" / "additional_chat_templates").exists()
    save_pretrained(checkpoint.model, tmp_path / "m", published=checkpoint.published)
    assert load_checkpoint(tmp_path / "m").published.generation_config == {"eos_token_id": 5}


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(tensors, "save_file", fail)
    with pytest.raises(OSError, match="no space"):
        save_pretrained(tiny_gpt2(seed=1), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    from_pretrained(tmp_path / "m")


def test_the_tokenizer_travels_with_the_model(tmp_path) -> None:
    tokenizer = Tokenizer.train(["some text"], 270)
    save_pretrained(tiny_gpt2(), tmp_path / "m", tokenizer)
    assert Tokenizer.load(tmp_path / "m").encode("text") == tokenizer.encode("text")


def trained_state(seed: int = 0) -> tuple[GPT2LMHeadModel, AdamW]:
    model = tiny_gpt2(seed)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(token_ids(2, 9)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_nothing_in_a_checkpoint_is_pickled(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {"a": 1}, 7)
    found = latest_checkpoint(tmp_path)
    files = sorted(p.name for p in found.iterdir())
    assert files == ["config.json", "model.safetensors", "optimizer.safetensors", "training.json"]
    for file in found.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        json.loads(file.read_bytes()[8 : 8 + header])


def test_the_training_state_comes_back_whole(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {"a": 1}, 7)
    other = tiny_gpt2(seed=5)
    fresh = AdamW(other.parameters(), lr=1e-2)
    assert load_training_state(latest_checkpoint(tmp_path), other, fresh, {"a": 1}) == 7
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[a][key], fresh.state[b][key])


def tiny_experts(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=97, n_layer=2, n_head=2, n_kv_head=2, n_embd=16, intermediate_size=24)
    sizes |= dict(q_lora_rank=None, kv_lora_rank=8, n_expert=8, top_k=2, n_group=2, top_group=1)
    return build(DeepseekV3Config(**sizes, expert_size=12, first_k_dense_replace=1))


def tiny_token_classifier(seed: int) -> nn.Module:
    return TokenClassifier(tiny_gpt2(seed).transformer, 3)


@pytest.mark.parametrize("make", [tiny_experts, tiny_token_classifier])
@pytest.mark.parametrize("frozen", [False, True])
def test_experts_their_bias_and_a_renamed_head_come_back(make, frozen, tmp_path) -> None:
    models = [make(seed).requires_grad_(not frozen) for seed in (0, 5)]
    optimizers = []
    for model in models:
        last = list(model.parameters())[-2:]
        optimizers.append(AdamW([p.requires_grad_() for p in last], lr=1e-2))
    for name, tensor in models[0].state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensor += torch.arange(len(tensor)) / 8
    save_training_state(tmp_path, models[0], optimizers[0], {}, 1)
    checkpoint = latest_checkpoint(tmp_path)
    load_training_state(checkpoint, models[1], optimizers[1], {})
    want, have = (model.state_dict() for model in models)
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    buffers = set(want) - {name for name, _ in models[0].named_parameters()}
    assert len(buffers) == (make is tiny_experts)
    for name in trained | buffers if frozen else want:
        assert torch.equal(want[name], have[name]), name
    if not frozen:
        read = from_pretrained if make is tiny_experts else classifier_from_pretrained
        idx = token_ids(2, 9)
        assert torch.equal(read(checkpoint)(idx), models[0].eval()(idx))


def test_a_checkpoint_of_a_run_is_also_a_model_folder(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 1)
    idx = token_ids(2, 9)
    assert torch.equal(from_pretrained(latest_checkpoint(tmp_path))(idx), model(idx))


def test_an_unfinished_checkpoint_is_not_used(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 3)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000009.tmp")
    os.remove(tmp_path / ".step-00000009.tmp" / "training.json")
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    save_training_state(
        tmp_path, model, optimizer, {}, 9
    )  # the rest of a killed run is no obstacle
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000009"]


def test_a_damaged_optimizer_file_changes_nothing(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 3)
    path = tmp_path / "step-00000003" / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    other = tiny_gpt2(seed=5)
    fresh = AdamW(other.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="damaged"):
        load_training_state(tmp_path / "step-00000003", other, fresh, {})
    untouched = tiny_gpt2(seed=5)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), untouched.parameters(), strict=True)
    )


def test_an_index_cannot_name_files_elsewhere(tmp_path) -> None:
    tiny_hf().save_pretrained(tmp_path / "secret")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(tmp_path / "secret" / "config.json", folder)
    names = load_file(tmp_path / "secret" / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../secret/model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no shard '\.\./secret"):
        from_pretrained(folder)


@pytest.mark.parametrize("index", ["{}", "[1]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_malformed_index_is_refused(folder, index: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"weight_map|no JSON object"):
        from_pretrained(folder)


def test_no_shard_is_larger_than_asked(tmp_path) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m", max_shard_bytes=20_000)
    for shard in (tmp_path / "m").glob("*.safetensors"):
        tensors = load_file(shard)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 20_000 or len(tensors) == 1


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {n: x.long() for n, x in t.items()}, "no dtype to compute in"),
        (lambda t: {**t, "h.0.ln_1.weight": torch.ones(28)}, "is there twice"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(folder, edit, message) -> None:
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path)
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder)


@pytest.mark.parametrize(
    "change", [{"n_embd": None}, {"n_layer": "3"}, {"eos_token_id": []}, {"vocab_size": 97.5}]
)
def test_config_values_of_another_type_are_refused(folder, change: dict) -> None:
    edit_config(folder, **change)
    with pytest.raises(ValueError, match=next(iter(change))):
        from_pretrained(folder)


def test_a_config_that_is_no_object_is_refused(folder) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        from_pretrained(folder)


def test_a_model_folder_with_other_files_is_left_alone(tmp_path) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m")
    (tmp_path / "m" / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        save_pretrained(tiny_gpt2(seed=1), tmp_path / "m")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"):
        save_pretrained(tiny_gpt2(), tmp_path / "file")


def test_a_link_and_the_current_folder_can_be_saved_to(tmp_path, monkeypatch) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_pretrained(tiny_gpt2(seed=1), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    idx = token_ids(1, 5)
    assert torch.equal(from_pretrained(tmp_path / "real")(idx), tiny_gpt2(seed=1)(idx))
    monkeypatch.chdir(tmp_path / "real")
    save_pretrained(tiny_gpt2(seed=2), ".")
    assert torch.equal(from_pretrained(tmp_path / "real")(idx), tiny_gpt2(seed=2)(idx))
    assert torch.equal(from_pretrained(".")(idx), tiny_gpt2(seed=2)(idx))


@pytest.mark.parametrize("fails_at", [0, 1])
def test_a_rename_that_fails_leaves_the_old_model(tmp_path, monkeypatch, fails_at: int) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m")
    real, calls = Path.rename, []

    def rename(self, target):
        calls.append(target)
        if len(calls) == fails_at + 1:
            raise OSError("no permission")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="no permission"):
        save_pretrained(tiny_gpt2(seed=1), tmp_path / "m")
    monkeypatch.undo()
    idx = token_ids(1, 5)
    assert torch.equal(from_pretrained(tmp_path / "m")(idx), tiny_gpt2()(idx))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("here", [False, True])
def test_ctrl_c_after_any_rename_leaves_the_old_model(tmp_path, monkeypatch, here) -> None:
    folder, idx = tmp_path / "m", token_ids(1, 5)
    save_pretrained(tiny_gpt2(), folder, max_shard_bytes=20_000)
    files = sorted(p.name for p in folder.iterdir())
    monkeypatch.chdir(folder if here else tmp_path)
    real, calls = Path.rename, []

    def ending_after(count: int):
        calls.clear()

        def rename(self, target):
            real(self, target)
            calls.append(target)
            if len(calls) == count:
                raise KeyboardInterrupt

        return rename

    for count in range(1, len(files) + 3 if here else 3):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "rename", ending_after(count))
            save_pretrained(tiny_gpt2(seed=1), folder)
        assert sorted(p.name for p in folder.iterdir()) == files
        assert torch.equal(from_pretrained(folder)(idx), tiny_gpt2()(idx))
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
    save_pretrained(tiny_gpt2(seed=1), folder)
    assert torch.equal(from_pretrained(folder)(idx), tiny_gpt2(seed=1)(idx))


def test_compiled_models_save_under_their_own_names_and_mixed_dtypes_are_refused(tmp_path) -> None:
    save_pretrained(torch.compile(tiny_gpt2()), tmp_path / "m")
    assert not from_pretrained(tmp_path / "m").training
    mixed = tiny_gpt2()
    mixed.transformer.ln_f.half()
    with pytest.raises(ValueError, match="different dtypes"):
        save_pretrained(mixed, tmp_path / "x")


def test_the_newest_checkpoint_counts_and_strangers_are_left_alone(tmp_path) -> None:
    model, optimizer = trained_state()
    (tmp_path / "step-by-step-notes").mkdir()
    for step in (9, 100):
        save_training_state(tmp_path, model, optimizer, {}, step)
        assert latest_checkpoint(tmp_path).name == f"step-{step:08}"
    save_training_state(tmp_path, model, optimizer, {}, 20)  # an older one does not remove it
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["step-00000009", "step-00000020", "step-00000100", "step-by-step-notes"]
    assert latest_checkpoint(tmp_path).name == "step-00000100"


def test_the_earlier_checkpoint_stays_until_the_new_one_has_its_name(tmp_path, monkeypatch) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 3)

    def fail(*args: object) -> None:
        raise OSError("killed")

    monkeypatch.setattr(state, "replace_folder", fail)
    with pytest.raises(OSError, match="killed"):
        save_training_state(tmp_path, model, optimizer, {}, 6)
    assert latest_checkpoint(tmp_path).name == "step-00000003"


def test_old_checkpoints_go_but_no_file_of_the_user_in_them(tmp_path) -> None:
    model, optimizer = trained_state()
    mine = [tmp_path / ".step-by-step" / "a", tmp_path / "step-00000001" / "notes.txt"]
    for step in range(1, 5):
        save_training_state(tmp_path, model, optimizer, {}, step)
        for file in mine:
            file.parent.mkdir(exist_ok=True)
            file.write_text("mine")
    (tmp_path / ".step-00000005.tmp").mkdir()  # of a run that was killed
    save_training_state(tmp_path, model, optimizer, {}, 5)
    assert [file.read_text() for file in mine] == ["mine"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-by-step", "step-00000001", "step-00000004", "step-00000005"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: {n: x for n, x in t.items() if "exp_avg_sq" not in n}, "does not fit"),
        (lambda t: {}, "does not fit"),
        (lambda t: {**t, "exp_avg/unknown": torch.zeros(1)}, "exp_avg/unknown"),
        (lambda t: {**t, "exp_avg/transformer.ln_f.bias": torch.zeros(1)}, "shapes differ"),
    ],
)
def test_an_optimizer_file_that_does_not_fit_changes_nothing(tmp_path, edit, message) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 3)
    path = tmp_path / "step-00000003" / "optimizer.safetensors"
    save_file(edit(load_file(path)), path)
    other = tiny_gpt2(seed=5)
    fresh = AdamW(other.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=message):
        load_training_state(tmp_path / "step-00000003", other, fresh, {})
    assert torch.equal(other.transformer.wte.weight, tiny_gpt2(seed=5).transformer.wte.weight)


def test_a_checkpoint_without_its_record_is_refused(tmp_path) -> None:
    model, optimizer = trained_state()
    save_training_state(tmp_path, model, optimizer, {}, 3)
    (tmp_path / "step-00000003" / "training.json").write_text("{}")
    with pytest.raises(ValueError, match="no record of a run"):
        load_training_state(tmp_path / "step-00000003", model, optimizer, {})


# ------------------------------------------------------------------------------------------ Qwen2


def test_qwen2_shards_old_constants_and_a_bare_backbone_load(tmp_path) -> None:
    from transformers import Qwen2Model as HFBackbone

    twin, idx = tiny_hf_qwen2(tie_word_embeddings=True), token_ids(2, 9)
    want = twin(idx).logits
    twin.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    torch.testing.assert_close(from_pretrained(tmp_path / "shards")(idx), want, atol=5e-5, rtol=0)
    backbone: HFBackbone = twin.model
    backbone.save_pretrained(tmp_path / "bare")
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    assert not any(name.startswith("model.") for name in tensors)
    tensors["rotary_emb.inv_freq"] = torch.ones(4)  # old files carry it along
    save_file(tensors, tmp_path / "bare" / "model.safetensors")
    torch.testing.assert_close(from_pretrained(tmp_path / "bare")(idx), want, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"module.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: name.replace("layers.1.", "layers.1._orig_mod."),
        lambda name: (
            f"_fsdp_wrapped_module.{name.replace('mlp.', '_checkpoint_wrapped_module.mlp.')}"
        ),
    ],
)
def test_names_of_what_was_wrapped_around_a_model_are_taken_off(wrap, tmp_path) -> None:
    model = tiny_qwen2()
    save_pretrained(model, tmp_path / "m")
    edit_tensors(tmp_path / "m", lambda t: t.update({wrap(name): t.pop(name) for name in [*t]}))
    loaded = from_pretrained(tmp_path / "m").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_torch_wraps_names_as_they_are_taken_off() -> None:
    compiled = torch.compile(tiny_gpt2(), backend="eager")
    names = {WRAPPER.sub("", name) for name in compiled.state_dict()}
    assert names == {*tiny_gpt2().state_dict()} != {*compiled.state_dict()}


def test_a_tied_qwen2_refuses_another_head_and_an_untied_one_needs_its_own(tmp_path) -> None:
    save_pretrained(tiny_qwen2(tie_word_embeddings=True), tmp_path / "tied")
    file = tmp_path / "tied" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file({**tensors, "lm_head.weight": torch.zeros(97, 48)}, file)
    with pytest.raises(ValueError, match=r"differs from model\.embed_tokens\.weight, and .* false"):
        from_pretrained(tmp_path / "tied")
    edit_config(tmp_path / "tied", tie_word_embeddings=False)  # as the message says
    assert not from_pretrained(tmp_path / "tied").head.weight.any()
    save_pretrained(tiny_qwen2(), tmp_path / "untied")
    file = tmp_path / "untied" / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        from_pretrained(tmp_path / "untied")


def test_another_architecture_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    names = ", ".join(map(repr, ["gpt2", *DIALECTS]))
    assert names.startswith("'gpt2', 'qwen2', 'llama', 'mistral', 'qwen3'")
    with pytest.raises(ValueError, match=f"'mamba'; only {names} can"):
        from_pretrained(tmp_path)


def test_a_dynamic_scaling_that_transformers_would_read_otherwise_is_not_written(tmp_path) -> None:
    scaling = DynamicNTKScaling(factor=2.0, original_length=32)
    with pytest.raises(ValueError, match=r"original_length=32 .* block_size=128"):
        save_pretrained(tiny_qwen2(rope_scaling=scaling), tmp_path / "m")
    assert not (tmp_path / "m").exists()
    save_pretrained(tiny_qwen2(rope_scaling=scaling, block_size=32), tmp_path / "m")
    assert from_pretrained(tmp_path / "m").config.rope_scaling == scaling


@pytest.mark.parametrize("family", ["GPT2", "Qwen2"])
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
@pytest.mark.parametrize("n_labels", [2, 5])
def test_classifiers_make_the_journey_to_transformers_and_back(
    family: str, kind: str, n_labels: int, tmp_path
) -> None:
    import transformers

    make = SequenceClassifier if kind == "Sequence" else TokenClassifier
    backbone = (tiny_gpt2() if family == "GPT2" else tiny_qwen2()).backbone
    ours = make(backbone, n_labels).eval()
    if kind == "Token":
        ours.dropout.p = 0.3
    enlarge_(ours)
    save_pretrained(ours, tmp_path / "ours")
    theirs_class = getattr(transformers, f"{family}For{kind}Classification")
    theirs, report = theirs_class.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert theirs.num_labels == n_labels
    idx = token_ids(1, 9)
    torch.testing.assert_close(theirs.eval()(idx).logits, ours(idx), atol=5e-5, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    back = classifier_from_pretrained(tmp_path / "theirs")
    assert type(back) is make and torch.equal(back(idx), ours(idx))
    if kind == "Token":
        assert back.dropout.p == 0.3
    with pytest.raises(ValueError, match="Classification: classifier_from_pretrained reads it"):
        from_pretrained(tmp_path / "theirs")


def test_a_run_is_no_model_but_names_it(tmp_path) -> None:
    for step in (8, 12):
        save_pretrained(tiny_qwen2(), tmp_path / "run" / f"step-{step:08}")
    with pytest.raises(ValueError, match=r"its model is .*run/step-00000012"):
        from_pretrained(tmp_path / "run")
    save_pretrained(tiny_qwen2(), tmp_path / "run" / "model")
    with pytest.raises(ValueError, match=r"run is a run, no model; its model is .*run/model"):
        from_pretrained(tmp_path / "run")


def test_a_folder_goes_before_the_shipped_model_of_that_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_pretrained("qwen2-docs").config.n_layer == 8
    save_pretrained(tiny_qwen2(), "qwen2-docs")
    assert from_pretrained("qwen2-docs").config.n_layer == tiny_qwen2().config.n_layer


def test_a_language_model_is_no_classifier(tmp_path) -> None:
    save_pretrained(tiny_qwen2(), tmp_path / "m")
    with pytest.raises(ValueError, match="'Qwen2ForCausalLM', no classifier"):
        classifier_from_pretrained(tmp_path / "m")


@pytest.mark.parametrize(
    ("said", "dropout"),
    [
        ({}, 0.1),
        ({"hidden_dropout": 0.0}, 0.0),
        ({"classifier_dropout": 0.4, "hidden_dropout": 0.0}, 0.4),
    ],
)
def test_the_dropout_of_a_token_classifier_is_found_as_transformers_finds_it(
    said, dropout, tmp_path
):
    save_pretrained(TokenClassifier(tiny_qwen2().backbone, 3), tmp_path / "m")
    contents = json.loads((tmp_path / "m" / "config.json").read_text())
    del contents["classifier_dropout"]
    (tmp_path / "m" / "config.json").write_text(json.dumps({**contents, **said}))
    assert classifier_from_pretrained(tmp_path / "m").dropout.p == dropout
