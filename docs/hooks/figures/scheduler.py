"""The picture of scheduler."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        760,
        176,
        "A step computes at most 4 new tokens, and the cache has 4 blocks of 2. In step 3 request b"
        " is preempted. In step 4 it finds 2 of its tokens in the cache.",
    )
    steps = (
        ("a", "a", "a", "b"),
        ("a", "b", "b", "b"),
        ("a", "", "", ""),
        ("b", "b", "b", ""),
    )
    for number, tokens in enumerate(steps):
        x = 20 + number * 188
        d.text(x, 34, f"step {number + 1}")
        again = number == 3
        kinds = {"a": "a", "b": "new" if again else "b", "": "off"}
        d.row(x, 46, [(token, kinds[token]) for token in tokens], w=40)
    for number, words in enumerate(
        ("prefill of a, chunk of b", "decode, rest of b", "b is preempted", "b again")
    ):
        d.text(20 + number * 188, 106, words, "note")
    d.text(
        20, 156, "Boxes: the token budget of a step. Empty boxes are not used.", "note"
    )
    return d
