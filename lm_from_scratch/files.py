"""Files that are written whole or not at all, and errors that name the file.

What is new is written under a temporary name and renamed when it is complete: a program that is
killed at any moment leaves what was there before, or what comes after, and nothing between.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
