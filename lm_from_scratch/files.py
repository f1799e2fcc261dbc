"""Files that are written whole or not at all, texts that are read, and errors that name the file.

What is new is written under a temporary name and renamed when it is complete: a program that is
killed at any moment leaves what was there before, or what comes after, and nothing between.
"""

import errno
import hashlib
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

#: Seconds that a pipe with a name may take to say something: perhaps nobody will write into it.
PATIENCE = 10.0


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """In the block, an ``OSError`` that names no file (of a full disk, say) is about ``path``."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """An empty file beside ``target``, to be filled; it is renamed if the block ends well, and
    removed otherwise. It has the rights that the user's umask gives, whoever writes it."""
    temporary = temporary_path(target)
    with naming(target):
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch()
            rights = temporary.stat().st_mode & 0o777
            yield temporary
            temporary.chmod(rights)
            to_disk(temporary)  # the contents must be there before the name is
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def temporary_path(target: Path) -> Path:
    """Where ``target`` is written before it gets its name."""
    return target.parent / f".{target.name}.tmp"


def to_disk(path: Path) -> None:
    """Wait until the contents of a file are on the disk."""
    with naming(path), open(path, "rb") as file:
        os.fsync(file.fileno())


def sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes."""
    with naming(path), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_text(path: str | Path) -> TextIO:
    """A text that the reader names, as UTF-8, without the mark that some programs put first: a
    file, or a pipe, as ``<(command)`` makes one.

    Raises ``OSError`` for a folder, ``ValueError`` for a device, and for a pipe with a name out of
    which nothing comes for a while.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise ValueError(f"{path} is neither a file nor a pipe")
    if stat.S_ISFIFO(mode) and os.path.exists(os.path.realpath(path)):  # one with a name
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if not select.select([number], [], [], PATIENCE)[0]:
            os.close(number)
            raise ValueError(f"{path} is a pipe, and nothing came out of it for {PATIENCE:g} s")
        os.set_blocking(number, True)
        return open(number, encoding="utf-8-sig")
    return open(path, encoding="utf-8-sig")


def read_text(path: str | Path) -> str:
    """All of a text, as :func:`open_text` gives it. Raises ``ValueError`` for bytes that are no
    UTF-8."""
    with as_utf8(path), naming(path), open_text(path) as file:
        text = file.read()
    check_zeros(text, path)
    return text


@contextmanager
def as_utf8(name: str | Path) -> Iterator[None]:
    """In the block, bytes that are no UTF-8 are a ``ValueError`` of one line about ``name``."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error}") from error


def check_zeros(text: str, name: str | Path) -> None:
    """Raises ``ValueError`` for text that is a quarter NUL: letters of two or four bytes, of which
    one alone is not 0, are UTF-8 as well. Without a mark of byte order nothing else tells."""
    start = text[:4096]
    if 4 * start.count("\0") > len(start):
        order = "BE" if start.startswith("\0") else "LE"
        raise ValueError(
            f"{name} is not UTF-8 text, but looks like UTF-16 or UTF-32: much of it is NUL; "
            f"iconv -f UTF-16{order} -t UTF-8 makes it UTF-8"
        )


def escaped(text: str) -> str:
    """A text from a file on one line: what would move the cursor is written as an escape."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
