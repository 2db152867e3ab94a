"""Docstring sections `Example:` and `Source:` for mkdocstrings.

Our docstrings have one example and say `Example:`; the parser knows `Examples:`. The source of an
idea is shown as a sentence, not as a box.
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
