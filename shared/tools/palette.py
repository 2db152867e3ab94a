"""The palette of all pictures: figures of the site, plots of the benchmark, the replay's report.

`css` writes it as variables for the site. Colours that tell things apart differ for every kind of
colour vision, on light and on dark pages (tests/structure/test_first_page.py), and each comes with
a label, a marker or an outline.
"""

from collections.abc import Mapping

LIGHT = {
    "page": "#ffffff",
    "ink": "#1d2329",
    "faint": "#59636d",
    "line": "#d5dae0",
    "grid": "#eceff2",
    "a": "#b5d6f5",
    "a-line": "#0b62a8",
    "b": "#ffd79a",
    "b-line": "#9c5a00",
    "new": "#7ccaa6",
    "new-line": "#00694c",
    "off": "#f1f2f3",
    "off-line": "#9aa3ab",
    "used": "#3d5266",
    "used-ink": "#ffffff",
}
"""Colours on light pages.

a, b: requests a and b. new: a third kind. off: unused or masked. used: slots that hold tokens of
any request. Names that end in "line" are outlines, and lines on the page.
"""

DARK = {
    "page": "#1e2129",
    "ink": "#eef1f4",
    "faint": "#aab3bc",
    "line": "#4a535e",
    "grid": "#2f353d",
    "a": "#1b4f80",
    "a-line": "#7fbcf2",
    "b": "#7a4a08",
    "b-line": "#f5b84f",
    "new": "#0f6b52",
    "new-line": "#5fd8b0",
    "off": "#2c3138",
    "off-line": "#717b85",
    "used": "#b9c9d8",
    "used-ink": "#16222c",
}
"""Colours on dark pages, of the same names."""

REQUESTS = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#d8ccf2",
    "#b8e0d0",
)
"""Fills of nine requests on light and dark pages, the first seven from Okabe and Ito, 2008.

Black text has contrast on each. The name of a request is shown as well.
"""

SERIES = ("#d55e00", "#00906a", "#b5558c", "#8f6b00", "#6f6fc4", "#6f7a85")
"""Lines and markers of plots, in addition to "a-line". Each series has a marker of its own."""


def css() -> str:
    """Return the palette as variables of a style sheet, for light and for dark pages."""
    parts = []
    for selector, colors in (
        (':root, [data-md-color-scheme="default"]', LIGHT),
        ('[data-md-color-scheme="slate"]', DARK),
    ):
        lines = [_variable(name, color) for name, color in colors.items()]
        lines += [
            _variable(f"request-{number}", color)
            for number, color in enumerate(REQUESTS)
        ]
        parts.append("\n".join([f"{selector} {{", *lines, "}"]))
    return "\n\n".join(parts) + "\n"


def plot_style(colors: Mapping[str, str], font_size: float) -> dict[str, object]:
    """Return the settings of matplotlib that all plots share.

    Args:
        colors: LIGHT or DARK.
        font_size: In points.
    """
    return {
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "axes.facecolor": colors["page"],
        "axes.edgecolor": colors["line"],
        "axes.labelcolor": colors["ink"],
        "axes.titlecolor": colors["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colors["grid"],
        "xtick.color": colors["faint"],
        "ytick.color": colors["faint"],
        "text.color": colors["ink"],
        "legend.frameon": False,
        "svg.hashsalt": "pagetwin",
    }


def _variable(name: str, color: str) -> str:
    return f"  --pt-{name}: {color};"
