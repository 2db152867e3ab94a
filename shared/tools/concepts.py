"""The list of concepts, and the search for a concept by an inexact name.

Nothing here is slow to import, so a misspelled name is reported at once.
"""

from difflib import get_close_matches

from rich.console import Console

from ..contract.operations import CONCEPTS


def print_concepts(console: Console) -> None:
    """Print the name and the subject of every concept, one line per concept."""
    width = max(len(concept.name) for concept in CONCEPTS)
    for concept in CONCEPTS:
        line = f"[bold]{concept.name:{width}}[/]  {concept.summary}"
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"\nTo see one: pagetwin explain {CONCEPTS[0].name}", highlight=False)


def find_concept(name: str) -> str:
    """Return the name of a concept from a name with hyphens, spaces or capitals.

    Raises:
        KeyError: No concept has this name. The message names close ones.
    """
    wanted = name.strip().lower().replace("-", "_").replace(" ", "_")
    names = [concept.name for concept in CONCEPTS]
    if wanted in names:
        return wanted
    close = [concept.name for concept in CONCEPTS if wanted in concept.operations]
    close = close or get_close_matches(wanted, names, 3, 0.6)
    words = [word.rstrip("s") for word in wanted.split("_") if len(word) > 2]
    close = close or [name for name in names if any(word in name for word in words)]
    found = close[:3]
    likely = f"did you mean {' or '.join(found)}? " if found else ""
    raise KeyError(
        f"concept = {name!r} does not exist: {likely}`pagetwin explain` lists all"
        f" {len(names)} concepts"
    )
