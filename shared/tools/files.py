"""Output files and folders: checked before a long run, and written completely or not at all."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = (".html", ".htm")
PICTURE = (".svg", ".png")
NO_ENDING = ""
ENDINGS = {
    "json": (".json", NO_ENDING),
    "markdown": (".md", ".markdown", NO_ENDING),
    "junit": (".xml", NO_ENDING),
    "trace": (".jsonl", NO_ENDING),
    "html": PAGE,
    "report": PAGE,
    "plot": PICTURE,
    "dark_plot": PICTURE,
}
"""The endings of each option's file. Another one would be opened by a program that cannot."""


def check_outputs(**paths: Path | None) -> None:
    """Raise if an output file could not be written, before anything is computed.

    Args:
        paths: The file of each option, by the name of the option. None means that the option is
            not given.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: The path is a folder.
        PermissionError: The file or its folder cannot be written, or is a device.
        ValueError: Two options name the same file, or a name has the ending of another format.
    """
    given = {option: path for option, path in paths.items() if path is not None}
    options: dict[Path, str] = {}
    for option, path in given.items():
        check_output(option, path)
        before = options.setdefault(path.resolve(), option)
        if before != option:
            raise ValueError(
                f"{before} and {option} are both {path}: expected two different files"
            )
    for option, path in given.items():
        endings = [ending for ending in ENDINGS[option] if ending != NO_ENDING]
        if path.suffix.lower() not in ENDINGS[option] and not _is_special(path):
            raise ValueError(
                f"{option} = {path}: expected a file that ends in {' or '.join(endings)}"
            )


def check_output(option: str, path: Path) -> None:
    """Raise if a file could not be written."""
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{option} = {path} is a folder: expected a file")
        if not path.parent.is_dir():
            raise FileNotFoundError(
                f"{option} = {path}: expected a file in a folder that exists"
            )
        if _is_special(path) and not _is_open(path):
            raise PermissionError(
                f"{option} = {path} is a device, a pipe or a socket: expected a file"
            )
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(
                f"{option} = {path} cannot be written: expected a file that you may write"
            )
        folder = path.resolve().parent
    except (OSError, RuntimeError) as error:
        raise _named(option, path, error) from None
    if not _is_special(path):
        _check_folder(option, path, folder)


def check_folder(option: str, path: Path) -> None:
    """Raise if a folder could not be made, or no file could be created in it.

    Raises:
        NotADirectoryError: The path is a file.
        PermissionError: The folder or a file in it cannot be created.
    """
    try:
        existing = path
        while not existing.exists() and not existing.is_symlink():
            existing = existing.parent
    except OSError as error:
        raise _named(option, path, error) from None
    if not existing.is_dir():
        if existing == path:
            raise NotADirectoryError(f"{option} = {path} is a file: expected a folder")
        raise _cannot_create(option, path, os.strerror(errno.ENOTDIR))
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if longest > (most := os.pathconf(existing, "PC_NAME_MAX")):
        raise ValueError(
            f"{option} = {path}: a name of {longest} bytes, expected at most {most}"
        )
    _check_folder(option, path, existing)


def make_folder(option: str, path: Path) -> list[Path]:
    """Make a folder and those above it, unless it exists. If it fails, none of them is left.

    Returns:
        The folders that did not exist before, each before the one that contains it.

    Raises:
        NotADirectoryError, PermissionError: As `check_folder`.
    """
    check_folder(option, path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for folder in missing:
            if os.path.isdir(folder):  # noqa: PTH112 - without an error for a long name
                folder.rmdir()
        raise _cannot_create(option, path, str(error.strerror)) from None
    return missing


def _cannot_create(option: str, path: Path, why: str) -> PermissionError:
    return PermissionError(
        f"{option} = {path} cannot be created ({why}): expected a folder that you may write"
    )


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


def _named(option: str, path: Path, error: Exception) -> Exception:
    """Return an error with the option; one of the system, such as a name that is too long."""
    if isinstance(error, OSError) and not error.strerror:
        return error
    why = getattr(error, "strerror", None) or "its links lead to itself"
    return ValueError(f"{option} = {path}: {why}; expected another path")


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder, which replaces `path` if no error is raised.

    A device such as /dev/stdout is yielded itself, because it must not be replaced.

    Raises:
        OSError: The file cannot be written. The message names it.
    """
    try:
        if _is_special(path):
            yield path
            return
        path = path.resolve()  # a link is followed, not replaced
        unfinished = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with whole_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _is_special(path: Path) -> bool:
    """Return whether a path is a device, a pipe or a socket."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _is_open(path: Path) -> bool:
    """Return whether this process has a special file open already, or it is /dev/null.

    Such are /dev/stdout, and the pipe of a shell's `>(command)`. Others might wait for a reader,
    never be full, or be a disk.
    """
    if path.samefile(os.devnull):
        return True
    found = path.stat()
    for descriptor in range(256):
        try:
            mode = os.fstat(descriptor)
        except OSError:
            continue
        if os.path.samestat(mode, found) and not stat.S_ISBLK(mode.st_mode):
            return True
    return False
