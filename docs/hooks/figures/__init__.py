"""How do the pictures of the documentation come about?

Each concept's picture is drawn in a file of its own as SVG and set into its page, so that its
colours follow the page's light or dark scheme (docs/css/pagetwin.css). The numbers are those of
the worked examples.
"""

import importlib


def figure(name: str) -> str:
    """Return the picture of that name as HTML for a page."""
    drawn: str = importlib.import_module(f".{name}", __name__).draw().svg()
    return drawn
