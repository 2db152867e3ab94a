"""Let the documentation read `Example:` and `Source:` as what they are.

Our docstrings have one example and so say `Example:`; the parser knows `Examples:`. Where an idea
comes from is one sentence, not a box.
"""

import re
import textwrap
from typing import Any

import griffe

SOURCE = re.compile(r"^Source:\n(?P<words>(?:    .*\n?)+)", re.M)


class ExampleSections(griffe.Extension):
    """Rewrites `Example:` and `Source:` before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        words = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
        obj.docstring.value = SOURCE.sub(_as_paragraph, words)


def _as_paragraph(found: re.Match[str]) -> str:
    return "**Source:** " + textwrap.dedent(found["words"])
