"""Files of the puzzles: which ones are meant, and how they are written.

Nothing here imports torch, so a wrong name is reported at once.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import nearest
from ..files import make_folder

if TYPE_CHECKING:
    from .puzzle import Puzzle

DEFAULT_FOLDER = Path("puzzles")
NAMES = (
    "slot_mapping", "append_blocks", "gather", "causal_mask", "sliding_window",
    "online_softmax", "gqa", "combine_splits", "cross_attention_lengths", "cascade",
    "fp8_write", "decode",
)  # fmt: skip
"""Names of the puzzles, in the order of their numbers."""


def file_of(name: str) -> str:
    """Return the file of a puzzle, such as "01_slot_mapping.py"."""
    return f"{NAMES.index(name) + 1:02}_{name}.py"


FILES = tuple(map(file_of, NAMES))


def choose(words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the folder and the names of the puzzles that a command names.

    Args:
        words: Optional folder, then names, numbers or files of puzzles. If no folder is named, it
            is the current one if that holds puzzles, else `puzzles`. If no puzzle is named, all
            are meant.

    Raises:
        ValueError: A word names no puzzle, and is not the first one or is not a folder.
    """
    rest = list(words)
    folders = []
    if rest and _find(rest[0]) is None:
        folders.append(_folder(rest.pop(0), is_alone=not rest))
    chosen = set()
    for word in rest:
        name = _find(word)
        if name is None:
            raise ValueError(f"puzzle = {word!r}: {_known(word)}")
        chosen.add(name)
        if Path(word).name != word:
            folders.append(Path(word).parent)
    if len(set(folders)) > 1:
        both = " and ".join(map(str, folders))
        raise ValueError(f"the puzzles are in {both}: expected those of one folder")
    is_here = any(Path(file).is_file() for file in FILES)
    folder = (folders or [Path() if is_here else DEFAULT_FOLDER])[0]
    return folder, [name for name in NAMES if not chosen or name in chosen]


def _find(word: str) -> str | None:
    """Return the name of a puzzle from its name, number or file."""
    wanted = Path(word).name.lower().replace("-", "_").replace(" ", "_")
    for number, (name, file) in enumerate(zip(NAMES, FILES, strict=True), 1):
        if wanted in (file, file[:-3]) or (
            wanted in (name, str(number)) and Path(word).name == word
        ):
            return name
    return None


def _folder(word: str, is_alone: bool) -> Path:
    """Return a folder, which may be new; raise if the word may be a wrong name of a puzzle.

    Args:
        word: The first word of a command.
        is_alone: Whether it is the only one, so that nothing else says what it is.
    """
    path = Path(word)
    if "/" in word or path.is_dir() or path == DEFAULT_FOLDER:
        return path
    if is_alone or nearest(word, NAMES, 0.8) or word.lstrip("+-").isdecimal():
        raise ValueError(
            f"{word!r} is neither a puzzle nor a folder: {_known(word)}, or for a new folder"
            f" ./{word}"
        )
    return path


def _known(word: str) -> str:
    """Return what is expected instead of a word."""
    names = ", ".join(f"{number} {name}" for number, name in enumerate(NAMES, 1))
    return f"{nearest(word, NAMES)}expected a name or number of: {names}"


def write(folder: Path, puzzles: "Sequence[Puzzle]") -> list[Path]:
    """Write the files of puzzles that the folder does not have yet. Return what was written.

    Either all files are written or none.

    Raises:
        FileExistsError: A file exists and is not the template. Nothing is written.
        OSError: A file cannot be written.
    """
    changed, missing = [], []
    for puzzle in puzzles:
        file = folder / puzzle.file
        if not file.exists():
            missing.append(puzzle)
        elif not file.is_file() or file.read_bytes() != puzzle.template.encode():
            changed.append(puzzle.file)
    if changed:
        raise FileExistsError(
            f"{folder} has files that you changed: {', '.join(changed)}. Nothing was written."
            " Name another folder, or only puzzles without a file there, for example"
            f" `pagetwin puzzles {folder} {(missing or puzzles)[-1].name}`."
            " To begin one anew, delete its file first."
        )
    made = make_folder("folder", folder)
    files = [folder / puzzle.file for puzzle in missing]
    temporary = [file.with_name(f".{file.name}.new") for file in files]
    written: list[Path] = []
    try:
        for puzzle, file in zip(missing, temporary, strict=True):
            file.write_bytes(puzzle.template.encode())
        for source, file in zip(temporary, files, strict=True):
            source.rename(file)
            written.append(file)
    except OSError:
        for file in (*temporary, *written):
            file.unlink(missing_ok=True)
        for new_folder in made:
            new_folder.rmdir()
        raise
    return files
