"""train --from, train --classify, classify and convert: models that come from a folder."""

import io
import json
import shlex
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import SMALL
from tiny_models import tiny_gpt2, tiny_qwen2

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.weights import (
    classifier_from_pretrained,
    from_pretrained,
    save_pretrained,
)
from lm_from_scratch.commands.options import size
from lm_from_scratch.models.heads import SequenceClassifier, TokenClassifier
from lm_from_scratch.text.labelled import read_labelled
from lm_from_scratch.text.tokenizer import Tokenizer

FRUIT, STONE = (
    ["apples and pears", "ripe plums", "a sour cherry"],
    ["granite", "grey slate", "flint"],
)
TOKENIZER = Tokenizer.train(["the tides turn twice a day. ", *FRUIT, *STONE] * 9, 290)
#: Short, with learning rates as large as such small models need.
SHORT = [
    "--block-size", "16", "--batch-size", "4", "--steps", "30", "--warmup", "2", "--lr", "3e-3",
    "--eval-every", "10", "--quiet", "--library", "torch",
]  # fmt: skip
MODELS = {
    "gpt2": lambda: tiny_gpt2(vocab_size=300, block_size=32),
    "qwen2": lambda: tiny_qwen2(vocab_size=300),
}


@pytest.fixture(params=["gpt2", "qwen2"])
def folder(request, tmp_path) -> Path:
    save_pretrained(MODELS[request.param](), tmp_path / "published", TOKENIZER)
    return tmp_path / "published"


@pytest.fixture
def notes(tmp_path) -> str:
    path = tmp_path / "notes.txt"
    path.write_text("\n\n".join(f"note {i}: the tides turn {i % 7} times" for i in range(300)))
    return str(path)


@pytest.fixture
def labelled(tmp_path) -> str:
    """What grows on trees, and what does not."""
    path = tmp_path / "things.tsv"
    rows = [f"{text} number {i}\t{label}" for i in range(12)
            for label, texts in (("fruit", FRUIT), ("stone", STONE)) for text in texts]  # fmt: skip
    path.write_text("text\tlabel\n" + "\n".join(rows) + "\n")
    return str(path)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_published_model_goes_on_learning(folder, notes, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    run = ["train", "--from", str(folder), "--corpus", notes, "--out", str(out), *SHORT]
    assert main(run) == 0
    said = losses(out)
    assert said[-1] < 0.8 * said[0]
    before, after = from_pretrained(folder), from_pretrained(out / "model")
    assert after.config == before.config and type(after) is type(before)
    assert not torch.equal(after.head.weight, before.head.weight)
    text = "the tides"
    assert Tokenizer.load(out / "model").encode(text) == TOKENIZER.encode(text)
    assert main(run) == 0
    assert "going on after step 30" in capsys.readouterr().out
    other = tmp_path / "scratch"  # the weights are those of the folder, not new ones
    assert main([*run[:-len(SHORT) - 2], "--out", str(other), *SHORT, "--lr", "1e-9",
                 "--min-lr", "0", "--steps", "4"]) == 0  # fmt: skip
    torch.testing.assert_close(
        from_pretrained(other / "model").head.weight, before.head.weight, atol=1e-6, rtol=0
    )


def test_nothing_of_a_published_folder_is_lost(folder, notes, tmp_path) -> None:
    """Also where the run was killed before its first checkpoint, and by convert."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"ours_does_not_know": [1], "torch_dtype": "float32"}
    path.write_text(json.dumps(config))
    more = {"generation_config.json": '{"eos_token_id": [1, 5]}', "chat_template.jinja": "{{ 1 }}"}
    for name, text in more.items():
        (folder / name).write_text(text)
    run = [
        "train",
        "--from",
        str(folder),
        "--corpus",
        notes,
        "--out",
        str(tmp_path / "run"),
        *SHORT,
    ]
    assert main([*run, "--dropout", "0.05", "--steps", "4"]) == 0
    assert main(["convert", str(folder), "--out", str(tmp_path / "new")]) == 0
    for made in (tmp_path / "run" / "model", tmp_path / "new"):
        assert json.loads((made / "config.json").read_text())["ours_does_not_know"] == [1]
        assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
        assert (made / "chat_template.jinja").read_text() == "{{ 1 }}"


def test_galore_and_dropout_fit_a_published_model(folder, notes, tmp_path) -> None:
    out = tmp_path / "run"
    more = ["--optimizer", "galore", "--dropout", "0.1", "--steps", "4"]
    assert (
        main(["train", "--from", str(folder), "--corpus", notes, "--out", str(out), *SHORT, *more])
        == 0
    )
    (step,) = out.glob("step-*")
    n_embd = from_pretrained(folder).config.n_embd
    recipe = json.loads((step / "training.json").read_text())["recipe"]
    assert recipe["train"]["rank"] == n_embd // 4
    if "embd_pdrop" in recipe["model"]:
        assert (recipe["model"]["embd_pdrop"], recipe["model"]["attn_pdrop"]) == (0.1, 0.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--n-embd", "64"], "--n-embd 64 is not for --from: the folder says it"),
        (["--vocab-size", "300"], "--vocab-size 300 is not for --from"),
        (["--architecture", "gpt2"], "--architecture gpt2 is not for --from"),
        (["--tokenizer", "x"], "--tokenizer x is not for --from"),
        (["--block-size", "4096"], "is more than the"),
        (["--classify", "x", "--corpus", "y"], "--corpus is not for --classify"),
        (["--classify", "/nowhere"], "/nowhere: No such file"),
    ],
)
def test_what_a_folder_decides_is_no_option(more, message, folder, tmp_path, capsys) -> None:
    assert main(["train", "--from", str(folder), "--out", str(tmp_path / "run"), *more]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["gpt2-docs", "someone/gpt2"])
def test_a_run_has_another_name_than_the_model_to_begin_with(
    name, tmp_path, monkeypatch, capsys
) -> None:
    """Its folder would be taken for the model, by this command or by the next."""
    monkeypatch.chdir(tmp_path)
    for out in (name, f"./{name}", str(tmp_path / name)):
        assert main(["train", "--from", name, "--out", out]) == 2
        error = capsys.readouterr().err
        assert "is the model itself" in error and error.count("\n") == 1
    for command in (["train"], ["quantize", "qwen2-docs"], ["convert", "qwen2-docs"]):
        assert main([*command, "--out", "gpt2-docs"]) == 2
        assert "a model of the package has that name" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_model_learns_labels_and_says_them(folder, labelled, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    run = ["train", "--from", str(folder), "--classify", labelled, "--out", str(out), *SHORT]
    assert main([*run, "--held-out", "0.2"]) == 0
    said = capsys.readouterr().out
    assert "held-out accuracy: " in said and "try: python -m lm_from_scratch classify" in said
    assert main(shlex.split(said.splitlines()[-1])[4:]) == 0  # the text is one of the file
    found = capsys.readouterr()
    assert found.out.startswith(("fruit\t", "stone\t")) and not found.err
    model = classifier_from_pretrained(out / "model")
    assert model.score.out_features == 2 and losses(out)[-1] < 0.2
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "fruit", "1": "stone"}
    assert main(["classify", "--model", str(out / "model"), "ripe plums number 5", "flint"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [label for label, _ in lines] == ["fruit", "stone"]
    assert all(0.5 < float(share) <= 1 for _, share in lines)
    # the classifier goes on, with its own labels
    again = ["train", "--from", str(out / "model"), "--classify", labelled, *SHORT]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert losses(tmp_path / "again")[0] < 0.5
    more = Path(labelled)
    more.write_text(more.read_text() + "an ant\tanimal\n")
    assert main([*again, "--out", str(tmp_path / "other")]) == 2
    assert "the label 'animal' is not one of ['fruit', 'stone']" in capsys.readouterr().err


def test_a_run_that_labels_goes_on_bit_for_bit(labelled, tmp_path, capsys) -> None:
    """A new model, too, and one that is interrupted."""
    run = ["train", "--classify", labelled, *SMALL, "--checkpoint-every", "2", "--out"]
    assert main([*run, str(tmp_path / "whole")]) == 0
    assert main([*run, str(tmp_path / "run")]) == 0
    (newest,) = (tmp_path / "run").glob("step-00000006")
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    assert main([*run, str(tmp_path / "run")]) == 0
    assert "going on after step 4" in capsys.readouterr().out
    got, want = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(torch.equal(got[name], want[name]) for name in want)
    text = Path(labelled)
    text.write_text(text.read_text().replace("granite", "marble"))
    assert main([*run, str(tmp_path / "run")]) == 2
    assert "has changed since this run began" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("no tab here\n", "line 1: it must be a text, a tab and a label"),
        ("a\tx\n\n\tx\n", "line 3: neither the text nor the label may be empty"),
        ("text\tlabel\n", "holds no text with a label"),
        ("fruit\tplum\nfruit\tfig\nstone\tflint\nfruit\tlime\nstone\tslate\n", "5 labels for 5"),
        ("a\tx\na\ty\n", "1 text cannot be split"),
        ("a\tx\nb\ty\n", "1 texts are fewer than batch_size=16"),
        ("".join(f"{i}\tx\n" for i in range(99)), "['x'] leaves nothing to learn: two labels"),
        ("a\tx\nb\ty\x07z\n", "line 2: the label 'y\\x07z' must be plain text"),
    ],
)
def test_labelled_texts_that_cannot_be_read_are_named(contents, message, tmp_path, capsys) -> None:
    (tmp_path / "x.tsv").write_text(contents)
    out = ["--out", str(tmp_path / "run"), *SMALL]
    assert main(["train", "--classify", str(tmp_path / "x.tsv"), *out]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("label", ["a\tb", "a\nb", "a\u2028b", "\ud800"])
def test_a_label_that_would_break_a_line_is_refused(label, tmp_path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a", "label": label}))
    with pytest.raises(ValueError, match=r"line 1: the label .* must be plain text"):
        read_labelled(tmp_path / "x.jsonl")


@pytest.mark.parametrize(
    "header", ["text\tlabel", "sentence\tlabel\r", "Text\tLabel", "id\ttext\tLABEL"]
)
def test_the_names_of_the_columns_are_no_row(header, tmp_path) -> None:
    (tmp_path / "x.tsv").write_text(f"{header}\na\tx\nb\tlabel\n")
    assert [(row.text, row.label) for row in read_labelled(tmp_path / "x.tsv")] == [
        ("a", "x"), ("b", "label"),
    ]  # fmt: skip


def test_classify_reads_files_and_refuses_what_is_no_classifier(
    labelled, folder, tmp_path, capsys, monkeypatch
) -> None:
    assert main(["classify", "--model", str(folder), "text"]) == 2
    assert "no classifier" in capsys.readouterr().err
    assert main(["train", "--classify", labelled, *SMALL, "--out", str(tmp_path / "run")]) == 0
    model = str(tmp_path / "run" / "model")
    capsys.readouterr()
    (tmp_path / "texts").write_text("flint\n\nripe plums\n")
    assert main(["classify", "--model", model, "--file", str(tmp_path / "texts"), "--quiet"]) == 0
    by_file = capsys.readouterr().out
    assert main(["classify", "--model", model, "flint", "ripe plums", "--quiet"]) == 0
    first, blank, last = by_file.splitlines()  # a line for each line of the file
    assert capsys.readouterr().out == f"{first}\n{last}\n" and not blank
    for mark in ("", "\ufeff"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{mark}flint\n\nripe plums\n"))
        assert main(["classify", "--model", model, "--file", "-"]) == 0
        assert capsys.readouterr().out == by_file
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", None)
        assert main(["classify", "--model", model, "flint", "ripe plums"]) == 0
    assert capsys.readouterr().out == f"{first}\n{last}\n"
    assert main(["classify", "--model", model, "flint", " "]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == "error: a TEXT is empty: ['flint', ' ']\n"
    (tmp_path / "latin").write_bytes("Fr\u00fcchte".encode("latin-1"))
    assert main(["classify", "--model", model, "--file", str(tmp_path / "latin"), "--quiet"]) == 2
    assert f"{tmp_path / 'latin'} is not UTF-8 text" in capsys.readouterr().err
    for words in ([], ["text", "--file", "x"]):
        assert main(["classify", "--model", model, *words]) == 2
        assert "give texts, or --file" in capsys.readouterr().err
    smaller = SequenceClassifier(tiny_qwen2(vocab_size=40).backbone, 2)
    save_pretrained(smaller, tmp_path / "smaller", TOKENIZER)
    assert main(["classify", "--model", str(tmp_path / "smaller"), "text"]) == 2
    assert "tokens, the model 40: they do not belong together" in capsys.readouterr().err
    save_pretrained(TokenClassifier(tiny_qwen2().backbone, 3), tmp_path / "tokens", TOKENIZER)
    assert main(["classify", "--model", str(tmp_path / "tokens"), "text"]) == 2
    assert "labels tokens, not texts" in capsys.readouterr().err
    assert main(["train", "--from", str(tmp_path / "tokens"), "--out", str(tmp_path / "x")]) == 2
    assert "holds a TokenClassifier" in capsys.readouterr().err


def test_convert_changes_dtype_and_files_and_nothing_else(folder, tmp_path, capsys) -> None:
    half, parts, back = (tmp_path / name for name in ("half", "parts", "back"))
    assert main(["convert", str(folder), "--out", str(half), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert f"written to {half}: bfloat16, was float32; " in said and "in 1 file\n" in said
    assert main(["convert", str(half), "--out", str(parts), "--max-shard", "20kB"]) == 0
    assert len([*parts.glob("*.safetensors")]) > 2
    assert main(["convert", str(parts), "--out", str(back), "--dtype", "float32"]) == 0
    want, got = from_pretrained(folder).state_dict(), from_pretrained(back).state_dict()
    assert all(torch.equal(got[name], want[name].bfloat16().float()) for name in want)
    assert Tokenizer.load(back).encode("tides") == TOKENIZER.encode("tides")
    assert main(["convert", str(back), "--out", str(back)]) == 2
    assert "is the model itself" in capsys.readouterr().err


def test_convert_carries_the_files_of_a_slow_tokenizer(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    old, new = tmp_path / "old", tmp_path / "new"
    save_pretrained(tiny_gpt2(vocab_size=300), old, TOKENIZER)
    model = json.loads((old / "tokenizer.json").read_text())["model"]
    (old / "tokenizer.json").unlink()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"])
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (old / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert main(["convert", str(old), "--out", str(new)]) == 0
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        assert (new / name).read_bytes() == (old / name).read_bytes()
    theirs = transformers.AutoTokenizer.from_pretrained(new)
    assert theirs("the tides")["input_ids"] == TOKENIZER.encode("the tides")
    assert main(["convert", str(old), "--out", str(new)]) == 0  # replaces what it wrote


def test_convert_leaves_no_tokenizer_of_the_model_before(tmp_path) -> None:
    save_pretrained(tiny_gpt2(vocab_size=300), tmp_path / "out", TOKENIZER)
    save_pretrained(tiny_gpt2(), tmp_path / "bare")
    assert main(["convert", str(tmp_path / "bare"), "--out", str(tmp_path / "out")]) == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors"}


def test_convert_carries_every_chat_template(tmp_path, capsys) -> None:
    transformers = pytest.importorskip("transformers")
    old, new = tmp_path / "old", tmp_path / "new"
    save_pretrained(tiny_gpt2(vocab_size=300), old, TOKENIZER)
    theirs = transformers.AutoTokenizer.from_pretrained(old)
    theirs.chat_template = {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
    theirs.save_pretrained(old)
    assert (old / "additional_chat_templates" / "rag.jinja").is_file()
    for _ in range(2):
        assert main(["convert", str(old), "--out", str(new)]) == 0
        assert Tokenizer.load(new).files.chat_template == "{{ 1 }}"
        both = transformers.AutoTokenizer.from_pretrained(new).chat_template
        assert both == {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
    TOKENIZER.save(old)  # another one, with no templates
    assert not [*old.rglob("*.jinja")]
    capsys.readouterr()
    (new / "additional_chat_templates" / "notes.txt").write_text("mine")
    assert main(["convert", str(old), "--out", str(new)]) == 2
    assert "['additional_chat_templates']" in capsys.readouterr().err
    assert (new / "additional_chat_templates" / "notes.txt").read_text() == "mine"


def test_only_a_checkpoint_has_the_tokenizer_of_the_folder_around_it(tmp_path, capsys) -> None:
    TOKENIZER.save(tmp_path)
    for name, found in (("sub", False), ("step-00000010", True)):
        folder, out = tmp_path / name, tmp_path / f"new-{name}"
        save_pretrained(tiny_gpt2(vocab_size=300), folder)
        assert main(["convert", str(folder), "--out", str(out)]) == 0
        assert (out / "tokenizer.json").is_file() == found
        words = ["generate", "--model", str(folder), "--max-new-tokens", "2"]
        assert main(words) == (0 if found else 2)
    assert "sub/tokenizer.json: a tokenizer.json file is needed" in capsys.readouterr().err


def test_a_size_may_have_any_number_of_digits() -> None:
    assert [size(text) for text in ("1.5G", "500mb", "7")] == [1_500_000_000, 500_000_000, 7]
    assert size("9" * 400) == int("9" * 400) and size("0.1" + "0" * 400 + "G") == 10**8
    for text in ("0.5", "-1", "1T", "9" * 5000):
        with pytest.raises((ArgumentTypeError, ValueError)):
            size(text)


def test_convert_refuses_numbers_that_do_not_fit(tmp_path, capsys) -> None:
    model = tiny_gpt2()
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = 1e5
    save_pretrained(model, tmp_path / "m")
    out = ["--out", str(tmp_path / "half"), "--dtype", "float16"]
    assert main(["convert", str(tmp_path / "m"), *out]) == 2
    assert "transformer.ln_f.weight" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()
