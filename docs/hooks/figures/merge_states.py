"""The picture of merge_states."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        190,
        "A quarter of 8 and three quarters of 4: each partial result by its weight.",
    )
    d.text(20, 30, "attention over the prefix")
    d.box(20, 44, 150, 40, "output 8", "a")
    d.box(170, 44, 150, 40, "weight 1", "a")
    d.text(20, 120, "attention over the suffix")
    d.box(20, 134, 150, 40, "output 4", "b")
    d.box(170, 134, 150, 40, "weight 3", "b")
    d.arrow(322, 64, 426, 104)
    d.arrow(322, 154, 426, 114)
    d.text(430, 74, "attention over both")
    d.box(430, 88, 150, 40, "output 5", "new")
    d.box(580, 88, 150, 40, "weight 4", "new")
    return d
