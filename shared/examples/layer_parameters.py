"""The worked examples and the picture of layer_parameters."""

from rich.text import Text

from .drawing import NEW, A, B, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def layer(name: str, window: str, style: str) -> list[Text]:
        cells = [(window, style), ("none", A), ("1/8", A)]
        return [Text(f"layer {name}", style=A), *boxes(cells, width=6)]

    return [
        *said(
            "Window, soft cap and scale of two layers. Only the windows differ, so", ""
        ),
        *beside(layer("a", "all", NEW), layer("b", "127", B)),
        *said("", "same windows: no      all the same: no"),
    ]


EXAMPLES = (
    Example(
        "get_per_layer_parameters",
        "One attention layer with a window, and one layer that is none.",
        (
            StoryStep(
                "A window of 128 keys is 127 to the left of the query, and the query's own.",
                "impl.sliding_window[0] + 1",
                "128",
            ),
        ),
    ),
    Example(
        "infer_global_hyperparameters",
        "Two layers that differ in their window share everything else.",
        (
            StoryStep(
                "Layer a attends to all keys, and its settings are returned.",
                "(shared.window_left, shared.sm_scale)",
                "(-1, 0.125)",
                step="take the first layer's parameters",
            ),
            StoryStep(
                "Layer b's window is another, so not all numbers are the same either.",
                "(-1 == 127, shared.has_same_all_params)",
                "(False, False)",
                step="compare the others with it",
            ),
        ),
    ),
)
