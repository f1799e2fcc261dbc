"""files.py: what a reader names, and what may stand there instead."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lm_from_scratch import files
from lm_from_scratch.__main__ import main
from lm_from_scratch.commands.loading import lines_of
from lm_from_scratch.files import read_text
from lm_from_scratch.text.corpora import read_texts
from lm_from_scratch.text.examples import read_rows
from lm_from_scratch.text.labelled import read_labelled

pytestmark = pytest.mark.skipif(os.name == "nt", reason="named pipes")

#: What reads each file of a reader, and a text that it takes.
READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "--corpus": (lambda path: [d.text for d in read_texts(path)], "the tide turns " * 9),
    "--sft": (read_rows, '{"prompt": "a", "completion": "b"}\n'),
    "--classify": (read_labelled, "the parcel never came\tmail\n"),
    "--prompts": (lambda path: list(lines_of(path)), "one\ntwo\n"),
}
WAYS = {
    "--corpus": "train --out out --corpus",
    "--sft": "train --out out --from gpt2-docs --sft",
    "--dpo": "train --out out --from gpt2-docs --dpo",
    "--grpo": "train --out out --from tasks --grpo",
    "--classify": "train --out out --classify",
    "--prompts": "generate --prompts",
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "PATIENCE", 0.2)


@pytest.mark.parametrize("way", READERS)
def test_a_pipe_is_read_as_the_file_that_it_stands_for(way: str, tmp_path: Path) -> None:
    """One of ``<(command)``, which has no name, one with a name, a file with a mark in front."""
    read, text = READERS[way]
    Path("file").write_text(text, encoding="utf-8-sig")
    expected = read("file")
    end, start = os.pipe()
    os.write(start, text.encode())
    os.close(start)
    assert read(f"/dev/fd/{end}") == expected
    os.close(end)
    os.mkfifo("pipe")
    writer = threading.Thread(target=lambda: Path("pipe").write_text(text, encoding="utf-8-sig"))
    writer.start()
    assert [*map(str, read("pipe"))] == [*map(str, expected)]
    writer.join()


@pytest.mark.parametrize("way", WAYS)
def test_a_command_waits_for_no_pipe_without_a_writer_and_reads_no_device(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    for name, words in (
        ("pipe", "pipe is a pipe, and nothing came out of it"),
        ("/dev/zero", "/dev/zero is neither a file nor a pipe"),
    ):
        assert main([*WAYS[way].split(), name]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert not Path("out").exists()


def test_an_error_while_a_text_is_read_names_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __enter__(self) -> "Broken":
            return self

        def __exit__(self, *about: object) -> None: ...

        def read(self) -> str:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "open_text", lambda path: Broken())
    with pytest.raises(OSError, match=r"Input/output error: 'notes\.txt'"):
        read_text("notes.txt")
