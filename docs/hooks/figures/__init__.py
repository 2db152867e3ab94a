"""Figures of the documentation, one file per concept.

Each figure is drawn as SVG and inlined into its page, so that its colours follow the light or dark
scheme of the page (docs/css/pagetwin.css). The numbers are those of the worked examples.
"""

import importlib


def figure(name: str) -> str:
    """Return the figure of that name as HTML for a page.

    A module that has `draw_narrow` gives two figures, and the page shows the one that fits the
    screen.
    """
    module = importlib.import_module(f".{name}", __name__)
    if not hasattr(module, "draw_narrow"):
        return str(module.draw().svg())
    return f"{module.draw().svg('wide')}\n{module.draw_narrow().svg('narrow')}"
