"""runs: the folder of a run, and what is made of files that have changed in it."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from small_run import SMALL

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.folders import SHIPPED
from lm_from_scratch.checkpoint.state import Damaged, checkpoints
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.runs.folder import only_run_in

EVERY = [*SMALL, "--checkpoint-every", "2"]


def own_text(folder: Path, word: str = "twice") -> list[str]:
    folder.mkdir(exist_ok=True)
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"note {i}: the tides turn {word} a day. " * 20)
    return ["--corpus", str(folder), "--held-out", "0.3"]


def flip(path: Path) -> None:
    """Change one bit in the middle."""
    contents = bytearray(path.read_bytes())
    contents[-100] ^= 1
    path.write_bytes(contents)


@pytest.fixture
def whole(tmp_path) -> dict[str, torch.Tensor]:
    """The weights of the run that nothing happened to; `run` becomes the same."""
    for out in ("whole", "run"):
        assert (
            main(["train", *own_text(tmp_path / "text"), "--out", str(tmp_path / out), *EVERY]) == 0
        )
    return from_pretrained(tmp_path / "whole" / "model").state_dict()


def again(tmp_path: Path) -> int:
    return main(["train", *own_text(tmp_path / "text"), "--out", str(tmp_path / "run"), *EVERY])


def test_a_text_that_changed_before_the_first_checkpoint_is_refused(tmp_path, capsys) -> None:
    own, out = own_text(tmp_path / "text"), tmp_path / "run"
    assert main(["train", *own, "--out", str(out), *SMALL]) == 0
    (step,) = checkpoints(out)
    for file in step.iterdir():  # as if it had been killed before
        file.unlink()
    step.rmdir()
    own_text(tmp_path / "text", "never")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert main(["train", *own, "--out", str(out), *SMALL]) == 2
    error = capsys.readouterr().err
    assert "has changed since this run began" in error and error.count("\n") == 1
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_tokens_on_disk_that_are_not_what_was_written_are_made_again(whole, tmp_path) -> None:
    out = tmp_path / "run"
    for step in checkpoints(out):
        for file in step.iterdir():
            file.unlink()
        step.rmdir()
    for name in ("train.bin", "held_out.bin"):
        path = out / "data" / name
        path.write_bytes(path.read_bytes()[::-1])
    assert again(tmp_path) == 0
    got = from_pretrained(out / "model").state_dict()
    assert all(torch.equal(got[name], want) for name, want in whole.items())


def test_a_run_goes_on_that_began_before_its_config_had_all_fields(whole, tmp_path) -> None:
    newest = checkpoints(tmp_path / "run")[-1]
    record = json.loads((newest / "training.json").read_text())
    off = [key for key, value in record["recipe"]["model"].items() if not value]
    assert off
    for key in off:
        del record["recipe"]["model"][key]
    (newest / "training.json").write_text(json.dumps(record))
    assert again(tmp_path) == 0
    got = from_pretrained(tmp_path / "run" / "model").state_dict()
    assert all(torch.equal(got[name], want) for name, want in whole.items())


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(whole, tmp_path, file) -> None:
    out = tmp_path / "run"
    before, newest = checkpoints(out)
    if file == "training.json":
        (newest / file).write_text("{")
    else:
        flip(newest / file)
    with pytest.warns(UserWarning, match=f"{newest / file} is .*; going on from {before}"):
        assert again(tmp_path) == 0
    got = from_pretrained(out / "model").state_dict()
    assert all(torch.equal(got[name], want) for name, want in whole.items())
    assert [json.loads(x)["step"] for x in (out / "log.jsonl").read_text().splitlines()] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again(tmp_path) == 0


def test_without_a_checkpoint_before_the_damaged_file_is_named(tmp_path, capsys) -> None:
    out = ["train", *own_text(tmp_path / "text"), "--out", str(tmp_path / "run"), *SMALL]
    assert main(out) == 0
    (step,) = checkpoints(tmp_path / "run")
    flip(step / "optimizer.safetensors")
    capsys.readouterr()
    assert main(out) == 2
    assert f"{step / 'optimizer.safetensors'} is damaged" in capsys.readouterr().err
    (step / "optimizer.safetensors").unlink()
    assert main(out) == 2
    assert f"{step / 'optimizer.safetensors'} is missing" in capsys.readouterr().err
    assert issubclass(Damaged, ValueError)


def test_the_lock_is_never_written_through_a_link(tmp_path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "thesis")
    with pytest.raises(ValueError, match=r"\.lock is a link"), only_run_in(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_an_empty_folder_of_the_user_survives_a_run_that_was_refused(tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("mine", "new"):
        with only_run_in(tmp_path / name):
            pass
    assert [*tmp_path.iterdir()] == [tmp_path / "mine"] and not [*(tmp_path / "mine").iterdir()]


@pytest.mark.parametrize("more", [[], ["--batch-size", "100000"], ["--from", "gpt2-docs"]])
def test_a_folder_with_files_of_no_run_is_left_as_it_is(more, tmp_path, capsys) -> None:
    out = tmp_path / "published"
    shutil.copytree(SHIPPED, out)
    (out / "chat_template.jinja").write_text("{{ messages }}")
    (out / "log.jsonl").write_text("mine")
    before = {p: p.read_bytes() for p in out.rglob("*")}
    sizes = SMALL[SMALL.index("--block-size") :] if "--from" in more else SMALL
    words = ["train", *own_text(tmp_path / "text"), "--out", str(out), *sizes, *more]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"{out} is left as it is" in error and error.count("\n") == 1
    assert {p: p.read_bytes() for p in out.rglob("*")} == before


def test_a_run_that_was_killed_before_its_recipe_goes_on(whole, tmp_path) -> None:
    out = tmp_path / "run"
    for path in out.iterdir():
        if path.name not in (".lock", "tokenizer.json", "tokenizer_config.json", "data"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert again(tmp_path) == 0
    got = from_pretrained(out / "model").state_dict()
    assert all(torch.equal(got[name], want) for name, want in whole.items())
