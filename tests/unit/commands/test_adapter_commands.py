"""Adapters on the command line: trained, opened beside a model or alone, and merged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train_answers import ROWS, command, write
from tiny_models import chat_folder, hf_twin, token_ids

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.interop.peft import load_with_adapter, save_lora
from lm_from_scratch.models.heads import SequenceClassifier
from lm_from_scratch.text.tokenizer import Tokenizer
from lm_from_scratch.weights.lora import add_lora_

WAYS = ["corpus", "sft", "dpo", "grpo"]
IDX = token_ids(2, 9)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return chat_folder(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(autouse=True)
def rewards(monkeypatch) -> None:
    """A random model is never right; of its answers some are even."""
    monkeypatch.setattr("lm_from_scratch.commands.answers.is_same", lambda _, a: len(a) % 2 == 0)


def train(way: str, source: Path, root: Path, *more: object) -> int:
    """A run of adapters in ``root / "run"``."""
    file = root / "rows.jsonl"
    if way == "corpus":
        (root / "notes.md").write_text("\n".join(f"word {n} and {n + 1}" for n in range(400)))
        file = root / "notes.md"
    else:
        write(file, ROWS[way])
    few = ["--group-size", 2] if way == "grpo" else []
    return main(command(way, file, source, root / "run", "--lora", 2, *few, *map(str, more)))


@pytest.fixture(scope="module")
def adapted(source, tmp_path_factory) -> Path:
    """A folder with a base, and an adapter of it whose numbers are large."""
    root = tmp_path_factory.mktemp("adapted")
    shutil.copytree(source, root / "base")
    model = from_pretrained(source)
    add_lora_(model, rank=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    save_lora(model, root / "lora", "base")
    return root


def logits(folder: Path) -> torch.Tensor:
    return load_with_adapter(folder).model(IDX).detach()


def said_error(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.filterwarnings("ignore")  # of what peft uses of transformers
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_trained_opened_by_peft_and_merged(
    source, tmp_path, capsys, monkeypatch, way
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert train(way, source, tmp_path, "--lr", "1e-2", "--lora-alpha", 64) == 0
    capsys.readouterr()
    folder = tmp_path / "run" / "model"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    monkeypatch.chdir("/")
    assert (
        main(["generate", "--model", str(folder), "--prompt", "1=", "--max-new-tokens", "9"]) == 0
    )
    assert capsys.readouterr().out.startswith("1=")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 64.0)
    twin = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    theirs = PeftModel.from_pretrained(twin, folder).eval()(IDX).logits.detach()
    torch.testing.assert_close(logits(folder), theirs, rtol=1e-4, atol=1e-4)
    assert (theirs - from_pretrained(source)(IDX)).abs().max() > 1e-3
    assert main(["convert", str(folder), "--merge", "--out", str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDX).logits.detach(), theirs, rtol=1e-4, atol=1e-4)
    ends = (
        json.loads(file.read_text())["eos_token_id"]
        for root in (folder, tmp_path / "merged")
        if (file := root / "generation_config.json").is_file()
    )
    assert [*ends] == ([[0, Tokenizer.load(source).backend.token_to_id("<|im_end|>")]] * 2
                       if way == "sft" else [])  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_run_of_adapters_goes_on_as_if_it_had_not_stopped(source, tmp_path, capsys, way) -> None:
    every = ["--checkpoint-every", 1]
    assert train(way, source, tmp_path, *every) == 0
    file = tmp_path / "run" / "model" / "adapter_model.safetensors"
    expected = load_file(file)
    shutil.rmtree(tmp_path / "run" / "model")
    assert main(["generate", "--model", str(tmp_path / "run" / "step-00000002")]) == 2
    assert "has adapters that are being trained" in said_error(capsys)
    shutil.rmtree(tmp_path / "run" / "step-00000003")
    assert train(way, source, tmp_path, *every) == 0
    assert "going on after step 2" in capsys.readouterr().out
    again = load_file(file)
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert any(tensor.any() for name, tensor in expected.items() if "lora_B" in name)
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("bits", ["4", pytest.param("8", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", ["sft", *(pytest.param(way, marks=pytest.mark.slow) for way in ("dpo", "grpo"))]
)
def test_adapters_are_trained_beside_quantised_weights(
    source, tmp_path, capsys, monkeypatch, way, bits
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = ["quantize", str(source), "--out", "codes", "--bits", bits]
    codes += ["--group-size", "8"] if bits == "4" else []
    assert main([*codes, "--dtype", "float32"]) == 0
    more = ["--kl", 0.1] if way == "grpo" else []
    outcomes = []
    for _ in range(2):  # the second run goes on after a step
        assert (
            train(way, Path("codes"), tmp_path, "--lr", 1e-2, "--checkpoint-every", 1, *more) == 0
        )
        outcomes.append(logits(Path("run/model")))
        shutil.rmtree("run/step-00000003")
    assert torch.equal(*outcomes)
    assert (outcomes[0] - from_pretrained("codes")(IDX)).abs().max() > 1e-3
    shutil.rmtree("codes")
    assert main(codes) == 0
    assert train(way, Path("codes"), tmp_path, "--out", "other", *more) == 2
    error = capsys.readouterr().err
    assert "codes computes in torch.bfloat16" in error and "quantize --dtype float32" in error


@pytest.mark.parametrize("base", ["absolute", "from here", "from there", "beside", "hub/beside"])
def test_the_base_is_found_where_the_adapter_names_it(adapted, tmp_path, monkeypatch, base) -> None:
    shutil.copytree(adapted, tmp_path / "copy")
    root = tmp_path / "copy"
    monkeypatch.chdir(root if base == "from here" else "/")
    named = {"absolute": str(root / "base"), "from here": "base", "from there": "../base",
             "beside": "base", "hub/beside": "an-owner/base"}[base]  # fmt: skip
    config = json.loads((root / "lora" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = named
    (root / "lora" / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(logits(root / "lora"), logits(adapted / "lora"))


def test_a_base_that_is_not_at_hand_is_named_with_what_to_do(adapted, tmp_path, capsys) -> None:
    shutil.copytree(adapted / "base", tmp_path / "all")  # a neighbour of the name of a lost one
    for number, (changes, message) in enumerate((
        ({"base_model_name_or_path": "an-owner/one"}, "an adapter of 'an-owner/one', which is not"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "an adapter of '/nowhere/at/all', which"),
        ({"base_model_name_or_path": "a/b", "revision": "v2"}, "revision='v2' is not fetched"),
        ({"base_model_name_or_path": None}, "an adapter that does not say of which model"),
        ({"base_model_name_or_path": 7}, "an adapter that does not say of which model"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        shutil.copytree(adapted / "lora", folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))
        for words in (
            ["generate", "--model"],
            ["convert", "--merge", "--out", "new"],
            ["describe"],
        ):
            assert main([*words, str(folder)]) == 2
            error = said_error(capsys)
            assert message in error and "base_model_name_or_path of" in error, error


@pytest.mark.parametrize("alone", [True, False])
def test_every_command_applies_the_adapter(adapted, tmp_path, capsys, alone) -> None:
    """Of a folder that holds an adapter alone, and of one with a model beside it."""
    folder, expected = adapted / "lora", logits(adapted / "lora")
    if not alone:
        folder = tmp_path / "both"
        shutil.copytree(adapted / "base", folder)
        shutil.copytree(adapted / "lora", folder, dirs_exist_ok=True)
        assert torch.equal(logits(folder), expected)
    assert (expected - from_pretrained(adapted / "base")(IDX)).abs().max() > 0.1
    greedy = ["--prompt", "a", "--temperature", "0", "--max-new-tokens", "12", "--ignore-eos"]
    texts = []
    merged = tmp_path / "merged"
    assert main(["convert", str(folder), "--merge", "--out", str(merged)]) == 0
    for model in (folder, merged, adapted / "base"):
        capsys.readouterr()
        assert main(["generate", "--model", str(model), *greedy]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert torch.equal(from_pretrained(merged)(IDX).detach(), expected)
    assert main(["quantize", str(folder), "--out", str(tmp_path / "q"), "--dtype", "float32",
                 "--weight-only"]) == 0  # fmt: skip
    difference = (from_pretrained(tmp_path / "q")(IDX) - expected).detach()
    assert difference.std() < 0.3 * (logits(adapted / "base") - expected).std()
    capsys.readouterr()
    assert main(["describe", str(folder)]) == 0
    assert "adapter, added to its weights" in capsys.readouterr().out
    write(tmp_path / "rows.jsonl", ROWS["sft"])
    start = command("sft", tmp_path / "rows.jsonl", folder, tmp_path / "run", "--lr", "1e-9",
                    "--min-lr", "0")  # fmt: skip
    assert main(start) == 0  # the model of both goes on learning, whole
    torch.testing.assert_close(logits(tmp_path / "run" / "model"), expected, atol=1e-3, rtol=1e-3)


def test_a_classifier_with_an_adapter_labels_as_both_do(tmp_path, capsys) -> None:
    model = SequenceClassifier(from_pretrained(chat_folder(tmp_path / "base")).backbone, 3)
    save_pretrained(model, tmp_path / "labels", Tokenizer.load(tmp_path / "base"))
    add_lora_(model, rank=2, also_train=lambda name: name == "score.weight")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3
    save_lora(model, tmp_path / "lora", "labels")
    checkpoint = load_with_adapter(tmp_path / "lora", "classifier")
    torch.testing.assert_close(checkpoint.model(IDX), model(IDX), rtol=1e-4, atol=1e-4)
    assert (classifier_from_pretrained(tmp_path / "labels")(IDX) - model(IDX)).abs().max() > 0.1
    assert main(["classify", "--model", str(tmp_path / "lora"), "a text"]) == 0
    assert capsys.readouterr().out.startswith("LABEL_")


def test_what_cannot_be_is_refused_in_one_line(adapted, source, tmp_path, capsys) -> None:
    run, file = ["--out", str(tmp_path / "run")], str(write(tmp_path / "r.jsonl", ROWS["sft"]))
    start = ["train", *run, "--from", str(source)]
    for words, message in (
        (["train", *run, "--lora", "2"], "--lora 2 is for a model that there is: give --from"),
        ([*start, "--lora", "0"], "--lora 0 must be an integer, at least 1"),
        ([*start, "--lora", "99", "--sft", file], "--lora 99: rank=99 exceeds what"),
        ([*start, "--lora-alpha", "2"], "--lora-alpha 2.0 is for --lora"),
        ([*start, "--lora", "2", "--classify", file], "--lora 2 does not work with --classify"),
        ([*start, "--lora", "2", "--parallel", "fsdp"], "--lora 2 does not work with --parallel"),
        (["train", *run, "--from", str(adapted / "lora"), "--lora", "2", "--sft", file],
         "has an adapter already: convert --merge"),
        (["convert", str(adapted / "lora"), *run], "has an adapter: --merge adds it"),
        (["convert", str(source), "--merge", *run], "has no adapter to --merge"),
    ):  # fmt: skip
        assert main(words) == 2, words
        assert message in said_error(capsys)
    bad = tmp_path / "pickled"
    shutil.copytree(adapted / "lora", bad)
    (bad / "adapter_model.safetensors").rename(bad / "adapter_model.bin")
    shutil.copytree(adapted / "base", tmp_path / "base")
    assert main(["generate", "--model", str(bad)]) == 2
    assert "adapter_model.bin may run code" in said_error(capsys)


def test_a_folder_with_a_model_is_not_replaced_by_adapters(adapted, tmp_path) -> None:
    shutil.copytree(adapted / "base", tmp_path / "base")
    model = from_pretrained(adapted / "base")
    add_lora_(model, rank=2)
    with pytest.raises(ValueError, match="left as it is, because it holds other files too"):
        save_lora(model, tmp_path / "base")
    torch.testing.assert_close(
        hf_twin(from_pretrained(tmp_path / "base"))(IDX).logits, model(IDX), rtol=1e-4, atol=1e-4
    )
