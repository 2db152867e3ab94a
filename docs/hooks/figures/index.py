"""The picture of index."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        262,
        "Two packages with the same files, names and signatures. Both use the same "
        "contract, and laws hold them equal.",
    )
    for x, name, kind, lines in (
        (20, "reference", "a", ("plain torch, any device", "to be read")),
        (520, "optimized", "b", ("numpy, Triton, xFormers", "to be fast")),
    ):
        d.box(x, 20, 220, 100, "", kind)
        d.text(x + 110, 52, f"pagetwin.{name}", "strong")
        for number, line in enumerate(lines):
            d.text(x + 110, 80 + 22 * number, line, "cell")
    d.text(380, 48, "the same results:", "cell")
    d.text(380, 70, "integers and bytes exactly,", "caption")
    d.text(380, 88, "arithmetic within a budget per row", "caption")
    d.arrow(310, 104, 246, 104)
    d.arrow(450, 104, 514, 104)
    d.box(150, 190, 460, 56, "", "new")
    d.text(380, 213, "pagetwin.contract, pagetwin.validation", "strong")
    d.text(380, 235, "shapes, specs, options, budgets, error messages", "cell")
    d.arrow(130, 124, 240, 186)
    d.arrow(630, 124, 520, 186)
    d.text(134, 166, "imports", "caption")
    d.text(626, 166, "imports", "caption")
    return d
