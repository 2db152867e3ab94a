"""The picture of draft_steps."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        170,
        "Two requests with a token and three drafts each. All drafts of the first are "
        "accepted, none of the second, whose draft model goes on from row 4.",
    )
    cells = [("t", "a"), *[(f"d{i}", "a") for i in (1, 2, 3)]]
    cells += [("t", "b"), *[(f"d{i}", "off") for i in (1, 2, 3)]]
    d.text(20, 40, "rows of the step")
    d.row(20, 54, cells, w=56)
    d.captions(20, 106, range(8), w=56)
    d.text(20, 140, "goes on from row 3")
    d.text(244, 140, "goes on from row 4; 5 to 7 are rejected")
    return d
