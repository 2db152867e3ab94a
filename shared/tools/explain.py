"""Worked examples of a concept in the terminal, with a picture and computed results."""

import importlib.util
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from ..contract.operations import CONCEPTS, load_implementation
from ..contract.operations import concept as concept_of
from ..examples import Example, draw, example_names, examples_of, run_example
from ..examples.drawing import DIM, NEW


def explain(concept: str, console: Console) -> None:
    """Print a concept's worked examples.

    Args:
        concept: A name from `operations.CONCEPTS`.
        console: The console to print to. 80 columns are enough.

    Raises:
        KeyError: The concept does not exist. The message lists all concepts.
    """
    topic = concept_of(concept)
    examples = examples_of(concept)
    reference = load_implementation("reference")
    console.print()
    console.print(Panel(Text(topic.summary, style="bold"), title=concept, width=80))
    console.print()
    console.print(Padding(Group(*draw(concept)), (0, 2)))
    for number, example in enumerate(examples, 1):
        console.print()
        heading = Text(f" {number}  {example.operation} ", style="reverse bold")
        console.print(heading)
        console.print(_tell(example, example_names(reference)))
    names = [listed.name for listed in CONCEPTS]
    following = names[names.index(concept) + 1 :]
    console.print()
    modules = dict.fromkeys(
        f"pagetwin.{twin}.{topic.module}" for twin in ("reference", "optimized")
    )
    for module in modules:
        console.print(Text(f"Source: {module}", style=DIM))
        console.print(Text(f"        {_file_of(module)}", style=DIM), soft_wrap=True)
    if following:
        console.print(Text(f"Next:   pagetwin explain {following[0]}", style=DIM))


def _file_of(module: str) -> str:
    """Return the installed file of a module, which exists in a wheel too.

    The module is not imported: that of the kernels needs triton.
    """
    *package, rest = module.split(".", 2)
    found = importlib.util.find_spec(".".join(package))
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parent / rest.replace(".", "/")) + ".py"


def _tell(example: Example, names: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = [Text(example.title), Text()]
    # the call comes first, because the explanation uses its names and numbers
    for source, _, shown in run_example(example, names):
        parts.append(
            Syntax(
                source,
                "python",
                theme="ansi_dark",
                background_color="default",
                word_wrap=True,
            )
        )
        if shown:
            parts.append(Text(shown, style=NEW))
    parts.append(Text())
    story = Table.grid(padding=(0, 1))
    for number, step in enumerate(example.story, 1):
        words = Text()
        if step.step:
            words.append(f"{step.step}: ", style="italic")
        words.append(step.text)
        calculation = Text().append(f"{step.expression}  is  ", style=DIM)
        calculation.append(repr(eval(step.expression, dict(names))), style=NEW)
        story.add_row(f"{number}.", Group(words, calculation))
    parts.append(story)
    return Padding(Group(*parts), (1, 2, 0, 3))
