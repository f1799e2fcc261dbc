"""__main__.py: the commands, as a newcomer would type them."""

import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_run import SMALL
from tiny_models import tiny_gpt2

import lm_from_scratch
from lm_from_scratch.__main__ import main, parser
from lm_from_scratch.checkpoint.weights import from_pretrained, save_pretrained
from lm_from_scratch.commands import speed
from lm_from_scratch.commands.presets import PRESETS
from lm_from_scratch.instruments.layout import TRAINING
from lm_from_scratch.models.qwen2 import Qwen2ForCausalLM
from lm_from_scratch.runs.folder import only_run_in
from lm_from_scratch.text.corpora import CORPORA, Document, load_split
from lm_from_scratch.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def a_fortieth_of_a_corpus() -> Iterator[None]:
    """Runs of six steps read no more than that: most of their time would be a tokenizer's."""

    def load_some(names: list[str], held_out: float) -> tuple[list[Document], list[Document]]:
        documents, others = load_split(names, held_out)
        step = 40 if {*names} & {*CORPORA} else 1
        return documents[::step], others[::step]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_from_scratch.commands.setups.load_split", load_some)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """The folder of a finished run, and what the command said."""
    out = tmp_path_factory.mktemp("small") / "a run ü"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(["train", "--out", str(out), *SMALL]) == 0
    return out, said.getvalue()


@pytest.fixture
def finished(trained, tmp_path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(trained[0], tmp_path / "run")


def test_train_then_generate(trained, finished, capsys) -> None:
    out, said = finished, trained[1]
    assert "parameters" in said and "step 6: held-out loss" in said and "try: python" in said
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    arguments = json.loads((out / "recipe.json").read_text())["arguments"]
    assert arguments["corpus"] == [*PRESETS["nano"].corpus] and arguments["steps"] == 6

    assert main(["train", "--out", str(out), *SMALL, "--steps", "9"]) == 2
    assert f"train its model further with --from {out / 'model'}" in capsys.readouterr().err

    generate = ["generate", "--model", str(out / "model"), "--prompt", "The ", "--seed", "3"]
    assert main([*generate, "--max-new-tokens", "10"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("The ")
    assert main([*generate, "--max-new-tokens", "10"]) == 0
    assert capsys.readouterr().out == first
    assert main([*generate, "--max-new-tokens", "5", "--num-return-sequences", "3"]) == 0
    assert capsys.readouterr().out.count("--- ") == 3


def test_the_hint_after_training_works_as_printed(trained, capsys) -> None:
    out, said = trained
    words = shlex.split(said.splitlines()[-1].removeprefix("try: "))
    assert words[:3] == ["python", "-m", "lm_from_scratch"]
    assert main(words[3:]) == 0
    assert capsys.readouterr().out.startswith("The")
    (step,) = out.glob("step-*")
    assert main(["generate", "--model", str(step), "--max-new-tokens", "3"]) == 0


def train(out: Path, *options: str) -> int:
    return main(["train", "--out", str(out), *SMALL, *options])


def test_train_again_does_nothing_more_and_cuts_what_the_log_is_ahead(finished, capsys) -> None:
    log = finished / "log.jsonl"
    whole = log.read_text()
    for more in ("", '{"step": 7, "loss": 1.0}\n{}\n{"step": 8, "lo'):
        log.write_text(whole + more)
        assert train(finished) == 0
        assert "going on after step 6" in capsys.readouterr().out
        assert log.read_text() == whole and whole.count("\n") == 6


def test_a_refused_command_leaves_the_run_as_it_was(finished, capsys) -> None:
    def files() -> dict:
        return {p: p.read_bytes() for p in sorted(finished.rglob("*")) if p.is_file()}

    before = files()
    assert train(finished, "--lr", "0.5") == 2
    assert "holds a run with --lr 0.003, not 0.5" in capsys.readouterr().err
    for change in (["--vocab-size", "280"], ["--corpus", "docstrings"]):
        assert train(finished, *change) == 2
    assert files() == before
    assert train(finished, "--checkpoint-every", "2", "--eval-every", "0") == 0  # may change


def test_a_recipe_that_says_less_meant_the_defaults(finished, capsys) -> None:
    """As one does that an earlier version has written."""
    recipe = json.loads((finished / "recipe.json").read_text())
    for name in ("weight_decay", "optimizer", "grad_accumulation", "rank", "tokenizer"):
        del recipe["arguments"][name]
    (finished / "recipe.json").write_text(json.dumps(recipe))
    assert train(finished, "--weight-decay", "0.2") == 2
    assert "holds a run with --weight-decay 0.1, not 0.2" in capsys.readouterr().err
    assert train(finished) == 0


def test_a_run_made_shorter_has_a_shorter_warmup(tmp_path) -> None:
    at = SMALL.index("--warmup")
    options = [*SMALL[:at], *SMALL[at + 2 :], "--steps", "20"]
    assert main(["train", "--out", str(tmp_path), *options]) == 0
    assert json.loads((tmp_path / "recipe.json").read_text())["arguments"]["warmup"] == 2


def test_a_qwen2_trains_goes_on_and_speaks(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    qwen2 = [*SMALL, "--architecture", "qwen2", "--n-kv-head", "1", "--dropout", "0.1"]
    assert main(["train", "--out", str(out), *qwen2]) == 0
    model = from_pretrained(out / "model")
    assert isinstance(model, Qwen2ForCausalLM)
    plain = [*qwen2[:-1], "0"]
    assert main(["train", "--out", str(tmp_path / "plain"), *plain]) == 0
    losses = [
        json.loads((folder / "log.jsonl").read_text().splitlines()[0])["loss"]
        for folder in (out, tmp_path / "plain")
    ]
    assert losses[0] != losses[1]  # the dropout acts
    assert (model.config.n_kv_head, model.config.intermediate_size) == (1, 48)
    assert main(["train", "--out", str(out), *qwen2]) == 0
    assert "going on after step 6" in capsys.readouterr().out
    assert main(["train", "--out", str(out), *SMALL]) == 2
    assert "holds a run with --architecture qwen2, not gpt2" in capsys.readouterr().err
    generate = ["generate", "--model", str(out / "model"), "--prompt", "The "]
    assert main([*generate, "--max-new-tokens", "60"]) == 0  # beyond the 32 it was trained on
    assert capsys.readouterr().out.startswith("The ")


def test_the_two_docs_presets_differ_in_the_architecture_alone() -> None:
    gpt2, qwen2 = PRESETS["docs"], PRESETS["docs-qwen2"]
    assert (gpt2.steps, gpt2.corpus) == (qwen2.steps, qwen2.corpus)
    sizes, others = vars(gpt2.model), vars(qwen2.model)
    other = {name for name in sizes if sizes[name] != others[name]}
    assert other == {"architecture", "n_kv_head", "intermediate_size"}


@pytest.mark.parametrize(
    "best",
    [pytest.param(best, marks=[pytest.mark.slow] * (i > 0)) for i, best in enumerate(TRAINING)],
)
def test_a_run_multiplies_as_it_is_fastest_here_and_stays_so(
    best, tmp_path, capsys, monkeypatch
) -> None:
    def begin(*more: str) -> int:
        short = [*SMALL, "--corpus", "reference", "--library", "auto"]
        return main(["train", "--preset", "docs", "--out", str(tmp_path / "run"), *short, *more])

    times = {way: 1.0 + (way != best) for way in TRAINING}
    monkeypatch.setattr(speed, "time_products", lambda model, rows: times)
    used = []
    monkeypatch.setattr("lm_from_scratch.commands.train.use_onednn_", used.append)
    assert begin("--steps", "6") == 0
    said = f"matrix products in {best[0]} by {best[1]}, 2.00x as fast as in "
    assert said in capsys.readouterr().out and bool(used) == (best[1] == "onednn")
    arguments = json.loads((tmp_path / "run" / "recipe.json").read_text())["arguments"]
    assert (arguments["dtype"], arguments["library"]) == best
    step = json.loads((tmp_path / "run" / "step-00000006" / "training.json").read_text())
    assert step["recipe"]["train"]["dtype"] == best[0]
    # the run goes on as it began, whatever is faster now, and in no other way unnoticed
    monkeypatch.setattr(speed, "time_products", lambda *_: pytest.fail("measured again"))
    for more in ([], ["--dtype", best[0]], ["--library", best[1]]):
        assert begin(*more) == 0 and "going on after step 6" in capsys.readouterr().out
    dtype = "float32" if best[0] == "bfloat16" else "bfloat16"
    assert begin("--dtype", dtype) == 2
    assert f"holds a run with --dtype {best[0]}, not {dtype}" in capsys.readouterr().err
    if best[0] == "float32":
        other = "torch" if best[1] == "onednn" else "onednn"
        assert begin("--library", other) == 2
        assert f"holds a run with --library {best[1]}, not {other}" in capsys.readouterr().err


def test_a_way_of_multiplying_is_compared_with_another(capsys) -> None:
    torch_, onednn = TRAINING[:2]
    for took, said in ((0.99, "about as fast as"), (1.0, "about as fast as"), (2.0, "2.00x as")):
        able = {torch_: 1.0, onednn: took}
        speed.say_products(able, able, torch_)
        out = capsys.readouterr().out
        assert f"by torch, {said}" in out and "in float32 by onednn\n" in out


def test_bfloat16_that_is_slow_here_is_warned_about(tmp_path, capsys, monkeypatch) -> None:
    times = dict(zip(TRAINING, (1.0, 2.0, 15.0), strict=True))
    monkeypatch.setattr(speed, "time_products", lambda model, rows: times)
    wanted = ["train", "--out", str(tmp_path / "run"), *SMALL, "--dtype", "bfloat16"]
    assert main(wanted) == 0
    warning = "warning: on this processor products in bfloat16 take 15.0 times as long as in float"
    assert warning in capsys.readouterr().err
    assert main(wanted) == 0 and "warning" not in capsys.readouterr().err


def test_onednn_trains(tmp_path) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), *SMALL, "--library", "onednn"]) == 0


@pytest.mark.parametrize("layout", ["measured", "rows", "columns", "packed", "off"])
def test_a_layout_changes_no_word(layout: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    words = ["generate", "--prompt", "Return the", "--max-new-tokens", "12"]
    assert main([*words, "--layout", "off"]) == 0
    want = capsys.readouterr()
    assert want.err == ""
    assert main([*words, "--layout", layout]) == 0
    found = capsys.readouterr()
    assert found.out == want.out
    assert found.err.startswith("weights in ") or layout == "off"


def test_a_model_stored_in_bfloat16_is_run_so_where_it_is_faster(tmp_path, monkeypatch) -> None:
    half = tmp_path / "half"
    assert main(["convert", "gpt2-docs", "--dtype", "bfloat16", "--out", str(half)]) == 0
    model = from_pretrained(half)
    for fast in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(speed, "faster_dtype", lambda model, rows, fast=fast: fast)
        for wanted, dtype in (("auto", fast), ("float32", torch.float32)):
            speed.in_dtype(model.bfloat16(), wanted, 1)
            assert {p.dtype for p in model.parameters()} == {dtype}
        speed.in_dtype(model.float(), "auto", 1)  # as it is stored
        assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.slow
def test_onednn_multiplies_in_galore_too(tmp_path, monkeypatch) -> None:
    shapes = []

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        shapes.append((a.shape, b.shape))
        return a @ b

    monkeypatch.setattr("lm_from_scratch.commands.train.onednn_matmul", product)
    galore = ["--optimizer", "galore", "--rank", "4"]
    for onednn in ([], ["--library", "onednn"]):
        assert shapes == []
        out = str(tmp_path / f"run{len(onednn)}")
        assert main(["train", "--out", out, *SMALL, *galore, *onednn]) == 0
    assert shapes


def test_galore_and_updates_in_backward_train(tmp_path, capsys) -> None:
    galore = [
        "--optimizer",
        "galore",
        "--rank",
        "4",
        "--update-proj-gap",
        "2",
        "--galore-scale",
        "1",
    ]
    out = str(tmp_path / "run")
    for more in ([], ["--update-in-backward"]):
        assert main(["train", "--out", out + "".join(more), *SMALL, *galore, *more]) == 0
    (step,) = (tmp_path / "run").glob("step-*")
    config = json.loads((step / "training.json").read_text())["recipe"]["train"]
    chosen = ("optimizer", "rank", "update_proj_gap", "scale", "moments")
    assert [config[name] for name in chosen] == ["galore", 4, 2, 1.0, "keep"]
    assert main(["train", "--out", out, *SMALL, *galore[:-1], "2"]) == 2
    assert "holds a run with --galore-scale 1.0, not 2.0" in capsys.readouterr().err


def test_muon_trains(tmp_path, capsys) -> None:
    out = str(tmp_path / "run")
    muon = ["--optimizer", "muon", "--muon-scale", "2"]
    assert main(["train", "--out", out, *SMALL, *muon]) == 0
    assert "the optimizer keeps" in capsys.readouterr().out
    (step,) = (tmp_path / "run").glob("step-*")
    config = json.loads((step / "training.json").read_text())["recipe"]["train"]
    assert (config["optimizer"], config["muon_scale"]) == ("muon", 2.0)


def test_the_readers_own_text(tmp_path) -> None:
    text = tmp_path / "my notes.txt"
    text.write_text("\n\n".join(f"note {i}: the tides turn twice a day" for i in range(900)))
    out = tmp_path / "run"
    assert (
        main(["train", "--corpus", str(text), "--held-out", "0.3", "--out", str(out), *SMALL]) == 0
    )


@pytest.mark.parametrize(
    ("form", "share"),
    [
        (["--bits", "8"], 0.53),
        pytest.param(
            ["--bits", "4", "--group-size", "32", "--dtype", "float16"],
            0.34,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_quantize_then_generate(tmp_path, capsys, form, share) -> None:
    out = str(tmp_path / "small")
    assert main(["quantize", "qwen2-docs", *form, "--out", out]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    before, after = (int(word) for word in said.split() if word.isdigit())
    assert "before, in float16; " in said
    assert after < share * before
    model = from_pretrained(out)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.bits == int(form[1])
    assert str(weight.dtype) == ("torch.float16" if "float16" in form else "torch.bfloat16")
    generate = ["generate", "--model", out, "--prompt", "Return the", "--temperature", "0"]
    generate += ["--layout", "off"]
    for more in ([], ["--num-beams", "2"], ["--num-return-sequences", "2"]):
        assert main([*generate, "--max-new-tokens", "8", *more]) == 0
        assert "Return the" in capsys.readouterr().out
    assert main(["quantize", out, "--out", str(tmp_path / "twice")]) == 2
    assert "is an Int" in capsys.readouterr().err


def test_quantize_leaves_other_files_and_the_model_itself_alone(tmp_path, capsys) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["quantize", "gpt2-docs", "--out", str(tmp_path)]) == 2
    assert "holds other files too: ['thesis.tex']" in capsys.readouterr().err
    model = str(tmp_path / "model")
    assert main(["quantize", "gpt2-docs", "--out", model]) == 0
    assert main(["quantize", model, "--out", model]) == 2
    assert "is the model itself" in capsys.readouterr().err
    assert main(["quantize", "gpt2-docs", "--bits", "4", "--group-size", "48", "--out", model]) == 2
    assert "128 numbers cannot be cut into groups of group_size=48" in capsys.readouterr().err
    assert main(["generate", "--model", model, "--prompt", "The", "--max-new-tokens", "3"]) == 0


def test_text_ends_before_a_stop_string(capsys) -> None:
    greedy = ["generate", "--prompt", "The", "--temperature", "0", "--max-new-tokens", "30"]
    greedy += ["--layout", "off"]
    for several in ([], ["--num-return-sequences", "2"]):
        assert main([*greedy, *several]) == 0
        text = capsys.readouterr().out
        stop = text[text.index("The") + 12 :][:4]
        assert main([*greedy, *several, "--stop", "@@", stop]) == 0
        shorter = capsys.readouterr().out
        assert stop in text and stop not in shorter and len(shorter) < len(text)
    assert main([*greedy, "--no-repeat-ngram", "2", "--min-p", "0.1", "--typical-p", "0.9"]) == 0


def test_beams_are_printed_with_their_scores(capsys) -> None:
    beams = ["generate", "--prompt", "The", "--num-beams", "3", "--max-new-tokens", "8"]
    assert main([*beams, "--num-return-sequences", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--- 1, score -") and "--- 2, score -" in said and said.count("The") >= 2
    assert main([*beams, "--num-return-sequences", "4"]) == 2
    assert "--num-return-sequences 4 must be in 1 ... --num-beams 3" in capsys.readouterr().err


def test_the_shipped_models_speak(capsys) -> None:
    said = []
    for model in ([], ["--model", "gpt2-docs"], ["--model", "qwen2-docs"]):
        assert main(["generate", "--prompt", "Return", "--max-new-tokens", "9", *model]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2] and min(map(len, said)) > len("Return\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("generate --device nonsense", "--device nonsense cannot be used here"),
        ("generate --device meta", "--device meta cannot be used here"),
        ("train --out OUT --device meta", "--device meta cannot be used here"),
        ("train --out OUT --vocab-size 10000000000", "--vocab-size 10000000000 is larger"),
        ("train --out OUT --corpus reference*999999999999999999999999999999",
         "a whole number is needed, 1 ... 9999"),
        ("train --out OUT --corpus reference*0", "a whole number is needed, 1 ... 9999"),
        ("generate --seed 1180591620717411303424", "does not fit into 64 bits"),
        ("generate --num-beams -1", "--num-beams -1 must be an integer, at least 0"),
        ("generate --num-beams 2 --stop .", "--stop '.' is not for --num-beams"),
        ("generate --min-p 2", "--min-p 2.0 must be in 0"),
        ("generate --no-repeat-ngram -1", "--no-repeat-ngram -1 must be an integer, at least 0"),
        ("train --out FILE", "is a file; it must be a folder"),
        ("train --out OUT --device nonsense", "--device nonsense"),
        ("generate --temperature -1", "--temperature -1.0"),
        ("generate --model /nowhere", "no folder /nowhere"),
        ("generate --max-new-tokens 100000", "do not fit into block_size=256"),
        ("train --out OUT --corpus /nowhere.txt", "neither a file nor a folder"),
        ("train --out OUT --checkpoint-every -1",
         "--checkpoint-every -1 must be an integer, at least 0"),
        ("train --out OUT --n-embd 30", "--n-embd 30 is not a multiple of --n-head 4"),
        ("train --out OUT --steps 10 --warmup 10", "--warmup 10 must be shorter"),
        ("train --out OUT --library onednn --dtype bfloat16",
         "--library onednn is for --dtype float32, not bfloat16"),
        ("train --out OUT --dropout 1", "--dropout 1.0 must be in [0, 1)"),
        ("train --out OUT --n-kv-head 2", "is for --architecture qwen2"),
        ("train --out OUT --rank 8", "--rank 8 is for --optimizer galore"),
        ("train --out OUT --galore-scale 1", "--galore-scale 1.0 is for --optimizer"),
        ("train --out OUT --moments reset", "--moments reset is for --optimizer"),
        ("train --out OUT --muon-scale 2", "--muon-scale 2.0 is for --optimizer"),
        ("train --out OUT --optimizer galore --rank 0", "--rank 0 must be an integer, at least 1"),
    ],
)  # fmt: skip
def test_bad_values_are_one_line_and_exit_code_2(command, message, tmp_path, capsys) -> None:
    places = {"OUT": str(tmp_path / "run"), "FILE": __file__}
    assert main([places.get(word, word) for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_command_that_failed_leaves_nothing_that_the_next_one_would_use(tmp_path, capsys) -> None:
    out = tmp_path / "run"
    for bad in (["--steps", "1"], ["--n-embd", "15"], ["--batch-size", "100000"]):
        assert main(["train", "--out", str(out), *SMALL, *bad]) == 2
    assert main(["train", "--out", str(out), *SMALL, "--vocab-size", "280"]) == 0
    assert json.loads((out / "recipe.json").read_text())["model"]["vocab_size"] == 280


def test_text_that_changed_since_is_refused(tmp_path, capsys) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for i in range(30):
        (text / f"{i}.txt").write_text(f"note {i}: the tides turn twice a day. " * 20)
    own = ["--corpus", str(text), "--held-out", "0.3", "--out", str(tmp_path / "run")]
    assert main(["train", *own, *SMALL]) == 0
    for i in range(30):
        (text / f"{i}.txt").write_text(f"note {i}: the tides turn never in a day. " * 20)
    assert main(["train", *own, *SMALL]) == 2
    assert "has changed since this run began" in capsys.readouterr().err


def test_a_second_run_in_a_folder_that_is_in_use_is_refused(tmp_path, capsys) -> None:
    with only_run_in(tmp_path / "run"):
        assert main(["train", "--out", str(tmp_path / "run"), *SMALL]) == 2
    assert "another run is using" in capsys.readouterr().err


def test_isolation_and_dropout_reach_the_run(tmp_path) -> None:
    logs = {}
    text = tmp_path / "text"
    text.mkdir()
    for i in range(150):  # short, so that every row holds several
        (text / f"{i}.txt").write_text(f"note {i}: the tides turn {i * i} times a day")
    own = ["--corpus", str(text), "--held-out", "0.3"]
    for name, change in (("a", []), ("b", ["--no-isolate"]), ("c", ["--dropout", "0.3"])):
        assert main(["train", "--out", str(tmp_path / name), *own, *SMALL, *change]) == 0
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        logs[name] = (last["loss"], last["held_out_loss"])
    assert len({loss for loss, _ in logs.values()}) == 3
    assert len({loss for _, loss in logs.values()}) == 3
    model = json.loads((tmp_path / "c" / "recipe.json").read_text())["model"]
    assert (model["embd_pdrop"], model["resid_pdrop"], model["attn_pdrop"]) == (0.3, 0.3, 0.0)


def test_a_few_notes_are_enough_to_train(tmp_path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("\n\n".join(f"note {i}: the tides turn twice a day" for i in range(400)))
    out = ["--corpus", str(text), "--out", str(tmp_path / "run")]
    assert main(["train", *out, *SMALL]) == 0


def test_a_padding_token_above_the_rows_stands_in_no_text(tmp_path, capsys, monkeypatch) -> None:
    tokenizer = Tokenizer.train(["some text"], 270)
    rows, folder = tokenizer.vocab_size, tmp_path / "m"
    tokenizer.backend.add_special_tokens(["[PAD]"])
    assert tokenizer.vocab_size == rows + 1
    save_pretrained(tiny_gpt2(vocab_size=rows), folder, tokenizer)
    assert main(["generate", "--model", str(folder), "--prompt", "[PAD] some"]) == 0
    assert capsys.readouterr().out.startswith("[PAD] some")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    monkeypatch.setattr("sys.stdin", io.StringIO("[PAD]\n"))  # in a chat the name is the token
    assert main(["generate", "--model", str(folder), "--chat"]) == 2
    assert f"token id {rows} is not below vocab_size={rows}" in capsys.readouterr().err
    tokenizer.backend.add_tokens(["plum"])  # which text does become
    save_pretrained(tiny_gpt2(vocab_size=rows), folder, tokenizer)
    assert main(["generate", "--model", str(folder), "--prompt", "x"]) == 2
    assert f"has {rows + 2} tokens, the model {rows}: they do not" in capsys.readouterr().err


def test_a_tokenizer_of_another_model_is_refused(tmp_path, capsys) -> None:
    save_pretrained(tiny_gpt2(), tmp_path / "m", Tokenizer.train(["some text"], 270))
    assert main(["generate", "--model", str(tmp_path / "m")]) == 2
    assert "they do not belong together" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", ["list", pytest.param("generate --max-new-tokens 40", marks=pytest.mark.slow)]
)
def test_a_reader_that_stops_early_is_no_error(words: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m lm_from_scratch {words} | head -c 3"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert len(done.stdout) == 3 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_package_in_a_zip_file_has_no_model(tmp_path) -> None:
    package = Path(lm_from_scratch.__file__).parent
    with zipfile.ZipFile(tmp_path / "lm.zip", "w") as archive:
        for path in package.rglob("*.py"):
            archive.write(path, path.relative_to(package.parent))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from lm_from_scratch.checkpoint.weights import load_shipped; load_shipped()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lm.zip")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "lm.zip" in done.stderr and "install the package, unpacked" in done.stderr


def test_doctor_finds_all_well_and_names_what_is_missing(capsys, monkeypatch, tmp_path) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "all well" in said and "gpt2-docs says: Return the" in said and "qwen2-docs says" in said
    monkeypatch.setattr("lm_from_scratch.checkpoint.folders.PRETRAINED", tmp_path)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "FIX   the shipped model" in said and "-> install the package again" in said


@pytest.mark.parametrize(
    ("slowdown", "line"),
    [
        pytest.param(1.0, "ok    more threads", marks=pytest.mark.slow),
        (1.2, "note  1 thread"),
    ],
)
def test_doctor_compares_with_one_thread(slowdown, line, capsys, monkeypatch) -> None:
    now = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: now.append(n))
    monkeypatch.setattr(
        "lm_from_scratch.commands.doctor.forward_seconds",
        lambda model, idx, repeats: 0.005 * (slowdown if now[-1] == 2 else 1.0),
    )
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert line in said and "5.0 ms" in said
    assert ("export OMP_NUM_THREADS=1" in said) == (slowdown > 1.1)
    assert now[-1] == 2


@pytest.mark.parametrize("command", [[], ["train"], ["generate"], ["doctor"]])
def test_help_explains(command: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert "usage: python -m lm_from_scratch" in said
    if command in (["train"], ["generate"]):
        assert "examples" in said and "how to choose" in said


def test_every_option_of_a_command_has_a_help_text() -> None:
    commands = parser()._subparsers._group_actions[0].choices
    for command in commands.values():
        assert all(action.help for action in command._actions)


def test_a_gpt2_takes_the_width_of_its_mlp_from_the_command_line(tmp_path) -> None:
    out = tmp_path / "run"
    assert main(["train", "--out", str(out), *SMALL, "--intermediate-size", "24"]) == 0
    assert from_pretrained(out / "model").config.intermediate_size == 24


def test_a_python_without_a_library_is_told_so(monkeypatch, capsys) -> None:
    def lacking(name: str) -> None:
        raise ModuleNotFoundError("No module named 'safetensors'", name="safetensors")

    monkeypatch.setattr("lm_from_scratch.__main__.import_module", lacking)
    assert main(["convert", "gpt2-docs", "--out", "x"]) == 2
    error = capsys.readouterr().err
    assert "has no safetensors: activate the environment" in error and error.count("\n") == 1


def test_nothing_is_said_before_the_numbers_are_checked(capsys) -> None:
    assert main(["generate", "--prompt", "Return", "--max-new-tokens", "5000"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "do not fit into block_size=256" in said.err
