"""The worked examples and the picture of merge_states."""

from rich.text import Text

from .drawing import NEW, A, B, beside, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    columns = beside(
        [*boxes([("8", A)], 8), under(["weight 1"], 8)],
        [*boxes([("4", B)], 8), under(["weight 3"], 8)],
        [*boxes([("5", NEW)], 8), under(["weight 4"], 8)],
        gap=6,
    )
    return [
        *said("Two averages over different keys, and the one over all of them:", ""),
        *columns,
    ]


EXAMPLES = (
    Example(
        "merge_attn_states",
        "A prefix and a suffix become one; the suffix weighs three times as much.",
        (
            StoryStep(
                "Neither log-sum-exp is infinite, so neither part is empty.",
                "[math.isinf(lse) for lse in (0.0, math.log(3))]",
                "[False, False]",
                "treat infinite log-sum-exps as empty",
            ),
            StoryStep(
                "The exponentials 1 and 3 are the weights that went into each part; together 4.",
                "[1 / 4, 3 / 4]",
                "[0.25, 0.75]",
                "compute the weight of each partial result",
            ),
            StoryStep(
                "A quarter of 8 and three quarters of 4.",
                "0.25 * 8 + 0.75 * 4",
                "5.0",
                "add the partial results that have weight",
            ),
        ),
    ),
    Example(
        "lse_weighted_combine",
        "Two ranks with logarithms to base 2: weights 1 and 2.",
        (
            StoryStep(
                "Both ranks saw keys.",
                "lse.shape",
                "torch.Size([1, 1])",
                "treat log-sum-exps that are not finite as empty",
            ),
            StoryStep(
                "2 ** 0 = 1 and 2 ** 1 = 2: a third and two thirds.",
                "[round(weight / 3, 4) for weight in (2**0, 2**1)]",
                "[0.3333, 0.6667]",
                "compute the weight of each partial result",
            ),
            StoryStep(
                "A third of 8 and two thirds of 4.",
                "round(8 / 3 + 2 * 4 / 3, 4)",
                "5.3333",
                "add the partial results that have weight",
            ),
        ),
    ),
    Example(
        "log2_lse_to_ln",
        "Weights 1, 2 and nothing, as powers of 2 and of e.",
        (
            StoryStep(
                "2 ** 1 is 2, and so is e ** 0.6931. What is empty stays empty.",
                "(2**1.0, round(math.exp(math.log(2)), 4))",
                "(2.0, 2.0)",
            ),
        ),
    ),
)
