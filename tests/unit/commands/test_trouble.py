"""What goes wrong around a command: full disks, rights, closed outputs, signals."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import SMALL

from lm_from_scratch.__main__ import main
from lm_from_scratch.checkpoint.folders import save_file
from lm_from_scratch.checkpoint.weights import from_pretrained
from lm_from_scratch.interop.cache_file import save_cache
from lm_from_scratch.interop.caches import from_legacy
from lm_from_scratch.text.tokenizer import Tokenizer

SLOW = pytest.mark.slow
PROGRAM = [sys.executable, "-m", "lm_from_scratch"]
NOTES = "\n\n".join(f"note {i}: the tides turn {i * i} times a day" for i in range(900))


@pytest.fixture
def notes(tmp_path) -> list[str]:
    (tmp_path / "notes.txt").write_text(NOTES)
    return ["train", "--corpus", str(tmp_path / "notes.txt"), *SMALL, "--checkpoint-every", "2"]


def one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr


def short_of_room(size: int):
    """No file of a child process may be longer than so many bytes."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def call(words: list[str], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *words], stderr=subprocess.PIPE, text=True, check=False, **options
    )


@pytest.mark.slow
def test_a_run_without_room_names_the_file_and_goes_on_when_there_is_some(
    notes, tmp_path, capsys
) -> None:
    out = tmp_path / "run"
    run = [*notes, "--out", str(out)]
    want = tmp_path / "whole"
    assert main([*notes, "--out", str(want)]) == 0
    for size, file in ((500, "tokenizer.json"), (20_000, "train.bin"), (60_000, ".safetensors")):
        one_line(call(run, preexec_fn=short_of_room(size)), file, "File too large")
        assert not [p for p in out.rglob("*.tmp") if p.is_file()]
    assert main(run) == 0
    got, want = (from_pretrained(folder / "model").state_dict() for folder in (out, want))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_what_cannot_be_written_leaves_what_was_there(tmp_path, capsys) -> None:
    model = str(tmp_path / "model")
    assert main(["quantize", "gpt2-docs", "--out", model]) == 0
    before = {p: p.read_bytes() for p in Path(model).iterdir()}
    quantize = ["quantize", "qwen2-docs", "--out", model]
    one_line(call(quantize, preexec_fn=short_of_room(100_000)), "File too large")
    assert {p: p.read_bytes() for p in Path(model).iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["generate", "--max-new-tokens", "3"], marks=SLOW),
        pytest.param(["generate", "--max-new-tokens", "3", "--num-beams", "2"], marks=SLOW),
        pytest.param(["quantize", "gpt2-docs", "--out", "OUT"], marks=SLOW),
        pytest.param(["quantize", "--help"], marks=SLOW),
        ["list"],
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_is_full_is_one_line(words, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    words = [str(tmp_path / "new") if word == "OUT" else word for word in words]
    with open("/dev/full", "w") as full:
        one_line(call(words, stdout=full), "the output: No space left on device")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_without_a_buffer_is_one_line_too(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with open("/dev/full", "w") as full:
        one_line(call(["list"], stdout=full), "the output: No space left on device")


@pytest.mark.slow
def test_a_run_whose_output_is_full_or_closed_goes_on_afterwards(notes, tmp_path) -> None:
    run = [*notes, "--out", str(tmp_path / "run")]
    with open("/dev/full", "w") as full:
        one_line(call(run, stdout=full), "the output: No space left on device")
    reader, writer = os.pipe()
    os.close(reader)  # as `| true` does, sooner or later
    done = call(run, stdout=writer)
    os.close(writer)
    assert "Traceback" not in done.stderr and "the output was closed" in done.stderr
    done = subprocess.run(
        f"exec {sys.executable} -m lm_from_scratch {' '.join(run)} >&-",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    one_line(done, "the output is closed")
    assert main(run) == 0


def test_a_run_without_a_place_for_errors_trains(notes, tmp_path, monkeypatch) -> None:
    notes.remove("--quiet")
    monkeypatch.setattr("sys.stderr", None)
    assert main([*notes, "--out", str(tmp_path / "run")]) == 0


@pytest.mark.parametrize(
    "words", [["generate", "--chat"], ["classify", "--model", "x", "--file", "-"]]
)
def test_an_input_that_is_closed_is_one_line(words, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error == f"error: {' '.join(words[3:] or words[1:])}: the input is closed\n"


@pytest.mark.parametrize("words", [["train", *SMALL], ["quantize", "gpt2-docs"]])
def test_a_place_that_is_none_is_named(words, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("mine")
    assert main([*words, "--out", str(tmp_path / "file" / "x")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file") in error and error.count("\n") == 1
    assert "Not a directory" in error or "File exists" in error
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("words", [["train", *SMALL], ["quantize", "gpt2-docs"]])
@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no /sys")
def test_a_folder_that_cannot_be_written_is_named(words, capsys) -> None:
    assert main([*words, "--out", "/sys/kernel/run"]) == 2  # for root, too
    error = capsys.readouterr().err
    assert error.startswith("error: /sys/kernel/") and error.count("\n") == 1


def test_an_empty_folder_that_one_stands_in_is_filled(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    number = folder.stat().st_ino
    monkeypatch.chdir(folder)
    assert main(["quantize", "gpt2-docs", "--out", "."]) == 0
    assert folder.stat().st_ino == number  # the shell still stands in it
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    from_pretrained(".")


def test_a_full_folder_that_one_stands_in_gets_new_files(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "here"
    assert main(["convert", "gpt2-docs", "--max-shard", "200K", "--out", str(folder)]) == 0
    number = folder.stat().st_ino
    monkeypatch.chdir(folder)
    assert main(["quantize", "qwen2-docs", "--out", "."]) == 0
    assert folder.stat().st_ino == number and Path("config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
    assert [p.name for p in folder.glob("*.safetensors")] == ["model.safetensors"]
    assert type(from_pretrained(".")).__name__ == "Qwen2ForCausalLM"


def test_a_folder_that_is_read_only_is_left_alone(tmp_path, monkeypatch, capsys) -> None:
    model = tmp_path / "model"
    assert main(["quantize", "gpt2-docs", "--out", str(model)]) == 0
    before = (model / "model.safetensors").read_bytes()
    model.chmod(0o555)
    if os.access(model, os.W_OK):  # root may write everywhere
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != model and access(path, mode))
    capsys.readouterr()
    assert main(["quantize", "qwen2-docs", "--out", str(model)]) == 2
    model.chmod(0o755)
    assert capsys.readouterr().err == f"error: {model}: Permission denied\n"
    assert (model / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "gpt2-docs", "--out", ""], ["quantize", "", "--out", "x"],
        ["train", "--out", ""], ["train", "--out", "x", "--corpus", ""],
        ["generate", "--model", ""],
        ["train", "--out", "x", "--tokenizer", " "], ["grade", "x", "--csv", ""],
    ],
)  # fmt: skip
def test_an_empty_name_is_refused(words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2 and "an empty name" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


END = b"--- the next command ---\n"
ONE_AFTER_THE_OTHER = f"""if True:
    import sys
    from lm_from_scratch.__main__ import start
    words, commands = sys.argv[1:], [[]]
    for word in words:
        commands.append([]) if word == ";" else commands[-1].append(word)
    for command in commands:
        sys.argv[1:] = command
        try:
            start()
        except SystemExit as stop:
            if stop.code:
                raise
        print({END.decode().strip()!r}, flush=True)
"""


def commands(
    locale: dict[str, str], *each: list[str | bytes]
) -> tuple[list[bytes], subprocess.CompletedProcess[bytes]]:
    """What each command prints, one after the other in one process, which imports torch once."""
    words = [word for command in each for word in (*command, ";")][:-1]
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, *words],
        env={**os.environ, **locale}, capture_output=True, check=False,
    )  # fmt: skip
    return done.stdout.split(END), done


@pytest.mark.parametrize(
    "locale",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0"},
        pytest.param({"PYTHONIOENCODING": "cp1252"}, marks=SLOW),
        pytest.param({"PYTHONIOENCODING": "ascii"}, marks=SLOW),
    ],
)
def test_what_cannot_be_shown_is_a_question_mark_and_what_is_no_text_one_line(
    locale, tmp_path
) -> None:
    out = os.fsencode(tmp_path) + "/rün☃".encode()  # a path keeps its name
    said, done = commands(
        locale,
        ["generate", "--max-new-tokens", "2", "--prompt", "Größe: ☃".encode()],
        ["convert", "gpt2-docs", "--out", out],
        ["generate", "--prompt", b"\xff"],  # no text
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and len(said) == 3
    assert said[0].startswith(b"Gr") and b"e: ?" in said[0]
    assert os.path.isfile(out + b"/config.json")


@pytest.mark.slow
def test_what_is_no_text_is_one_line_where_text_is_utf_8() -> None:
    one_line(call(["generate", "--prompt", os.fsdecode(b"\xff")]))


@pytest.mark.parametrize(
    "locale", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, pytest.param({}, marks=SLOW)]
)
def test_what_is_piped_in_is_utf_8(locale) -> None:
    code = """if True:
        from lm_from_scratch import __main__
        __main__.take_any_text()
        print(ascii(input()))
    """
    options = {"env": {**os.environ, **locale}, "capture_output": True, "check": False}
    echo = [sys.executable, "-c", code]
    done = subprocess.run(echo, input="\ufeffGröße".encode(), **options)
    assert done.stdout == b"'Gr\\xf6\\xdfe'\n"


@pytest.mark.slow
def test_a_command_without_stderr_does_its_work(tmp_path) -> None:
    words = ["convert", "gpt2-docs", "--dtype", "bfloat16", "--out", str(tmp_path / "m")]
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>&-', "sh", *PROGRAM, *words], check=False)
    assert done.returncode == 0
    from_pretrained(tmp_path / "m")


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_rights_that_the_umask_gives(umask, tmp_path) -> None:
    before = os.umask(umask)
    try:
        k = torch.randn(1, 1, 2, 3)
        save_file({"k": k}, tmp_path / "tensors.safetensors")
        save_cache(from_legacy([(k, k)]), tmp_path / "cache.safetensors")
        Tokenizer.train(["some text"], 260).save(tmp_path)
        assert main(["quantize", "gpt2-docs", "--out", str(tmp_path / "model")]) == 0
    finally:
        os.umask(before)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.stat().st_mode & 0o777 for p in files} == {0o666 & ~umask} and len(files) > 4


def test_a_missing_permission_is_called_one(tmp_path, monkeypatch, capsys) -> None:
    model = tmp_path / "model"
    assert main(["quantize", "gpt2-docs", "--out", str(model)]) == 0
    file = model / "model.safetensors"
    file.chmod(0)
    if os.access(file, os.R_OK):  # root may read everything
        file.unlink()
        file.symlink_to("/proc/1/mem")
        monkeypatch.setattr(Path, "is_file", lambda self: True)
        real = open

        def refuse(path, *more, **options):
            if str(path) == str(file):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *more, **options)

        monkeypatch.setattr("builtins.open", refuse)
    assert main(["generate", "--model", str(model)]) == 2
    error = capsys.readouterr().err
    assert error == f"error: {file}: Permission denied\n"


# ------------------------------------------------------------------------------------------ signals


def end(words: list[str], number: int, **options) -> subprocess.CompletedProcess[str]:
    """A command that gets a signal while it imports torch."""
    process = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    maps = Path(f"/proc/{process.pid}/maps")
    while maps.exists() and process.poll() is None and "libtorch" not in maps.read_text():
        time.sleep(0.005)
    time.sleep(0.05 if maps.exists() else 0.5)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=SLOW) for n in (signal.SIGTERM, signal.SIGHUP))],
)
def test_a_signal_while_modules_are_imported_is_one_line(number) -> None:
    done = end(["generate", "--max-new-tokens", "100"], number)
    assert done.returncode == 128 + number and done.stderr.count("\n") == 1
    assert done.stderr.startswith("interrupted")


@pytest.mark.slow
def test_a_signal_that_is_ignored_from_the_start_stays_so() -> None:
    done = end(
        ["generate", "--max-new-tokens", "3"], signal.SIGHUP,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr
