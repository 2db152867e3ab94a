"""The picture of rswa."""

from .drawing import Drawing

PROMPT, WINDOW, TOKENS = 4, 2, 10


def draw() -> Drawing:
    d = Drawing(
        700,
        360,
        "Visible keys of a prompt of 4 tokens and 6 generated ones, with a window of 2. The "
        "prompt stays visible; between it and the window nothing is.",
    )
    size = 30
    for query in range(TOKENS):
        d.text(20, 52 + query * size, f"query p{query}")
        for key in range(TOKENS):
            is_near = query - key < WINDOW
            kind = "a" if key < PROMPT else "new" if is_near else "off"
            kind = kind if key <= query else "off"
            d.box(110 + key * size, 32 + query * size, size, size, "", kind)
    d.captions(110, 24, [f"p{key}" for key in range(TOKENS)], w=size)
    d.text(440, 60, "the prompt: p0 to p3")
    d.text(440, 142, "p3: range (0, 3)")
    d.text(440, 202, "p5: range (0, 3), window p4, p5")
    d.text(440, 292, "p8: p4 to p6 can be freed")
    return d
