"""Files of the puzzles: which ones are meant, and how they are written."""

from collections.abc import Sequence
from pathlib import Path

from .puzzle import Puzzle
from .tasks import PUZZLES

DEFAULT_FOLDER = Path("puzzles")


def choose(words: Sequence[str]) -> tuple[Path, list[Puzzle]]:
    """Return the folder and the puzzles that a command names.

    Args:
        words: Optional folder, then names or numbers of puzzles. If no folder is named, it is the
            current one if that holds puzzles, else `puzzles`. If no puzzle is named, all are meant.

    Raises:
        ValueError: A word after the first one names no puzzle.
    """
    names = list(words)
    folder = None
    if names and _find(names[0]) is None:
        folder = Path(names.pop(0))
    if folder is None:
        is_here = any(Path(puzzle.file).is_file() for puzzle in PUZZLES)
        folder = Path() if is_here else DEFAULT_FOLDER
    chosen = []
    for name in names:
        puzzle = _find(name)
        if puzzle is None:
            known = ", ".join(f"{each.number} {each.name}" for each in PUZZLES)
            raise ValueError(
                f"puzzle = {name!r}: expected a name or number of: {known}"
            )
        chosen.append(puzzle)
    return folder, [each for each in PUZZLES if each in chosen] or list(PUZZLES)


def _find(word: str) -> Puzzle | None:
    """Return a puzzle by its name, number or file."""
    for puzzle in PUZZLES:
        if Path(word).name in (puzzle.file, puzzle.file[:-3]) or word in (
            puzzle.name,
            str(puzzle.number),
        ):
            return puzzle
    return None


def write(folder: Path, puzzles: Sequence[Puzzle]) -> list[Path]:
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
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
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
        if made:
            folder.rmdir()
        raise
    return files
