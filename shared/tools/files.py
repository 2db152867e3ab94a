"""Output files and folders: checked before a long run, and written completely or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_outputs(**paths: Path | None) -> None:
    """Raise if an output file could not be written, before anything is computed.

    Args:
        paths: The file of each option, by the name of the option. None means that the option is
            not given.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: The path is a folder.
        PermissionError: The file or its folder cannot be written.
        ValueError: Two options name the same file.
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        _check_output(option, path)
        before = options.setdefault(path.resolve(), option)
        if before != option:
            raise ValueError(
                f"{before} and {option} are both {path}: expected two different files"
            )


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{option} = {path} is a folder: expected a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{option} = {path}: expected a file in a folder that exists"
        )
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(
            f"{option} = {path} cannot be written: expected a file that you may write"
        )
    if not _is_replaced(path):
        return
    _check_folder(option, path, path.resolve().parent)


def make_folder(option: str, path: Path) -> None:
    """Make a folder and those above it, unless it exists.

    Args:
        option: The name of the option or the argument.
        path: The folder.

    Raises:
        NotADirectoryError: The path is a file.
        PermissionError: The folder cannot be made, or no file can be created in it.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{option} = {path} is a file: expected a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PermissionError(
            f"{option} = {path} cannot be created ({error.strerror}): expected a folder that"
            " you may write"
        ) from None
    _check_folder(option, path, path)


def _check_folder(option: str, path: Path, folder: Path) -> None:
    """Raise if no file can be created in a folder."""
    try:
        # the only reliable test, also on a read-only or full file system
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PermissionError(
            f"{option} = {path}: no file can be created in {folder} ({error.strerror}):"
            " expected a folder that you may write"
        ) from None


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` if no error is raised.

    A device such as /dev/stdout is yielded itself, because it must not be replaced.
    """
    if not _is_replaced(path):
        yield path
        return
    path = path.resolve()  # a link is followed, not replaced
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _is_replaced(path: Path) -> bool:
    return path.is_file() or not path.exists()
