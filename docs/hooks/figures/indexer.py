"""The picture of indexer."""

from .drawing import Drawing

SCORES, TOPK = (5, 1, 5, 7, 5), 3


def draw() -> Drawing:
    d = Drawing(
        700,
        290,
        "Above: a block of the indexer's cache has the codes of all its tokens, then their "
        "scales. Below: one token's scores of five keys. It selects three, and of the equal "
        "scores those at the lowest positions.",
    )
    d.text(20, 62, "block of 4")
    d.row(130, 40, [(f"codes {token}", "a") for token in range(4)], w=96)
    d.row(514, 40, [(f"s{token}", "b") for token in range(4)], w=40)
    d.text(20, 152, "scores")
    ranked = sorted(range(len(SCORES)), key=lambda position: -SCORES[position])
    chosen = sorted(ranked[:TOPK])
    cells = [
        (str(score), "new" if position in chosen else "off")
        for position, score in enumerate(SCORES)
    ]
    d.row(130, 130, cells, w=70)
    d.captions(130, 182, [f"p{position}" for position in range(len(SCORES))], w=70)
    d.text(20, 242, "selected")
    d.row(130, 220, [(f"p{position}", "new") for position in chosen], w=70)
    return d
