"""The picture of layer_parameters."""

from .drawing import Drawing


def draw() -> Drawing:
    d = Drawing(
        700,
        190,
        "The parameters that a plan would fix, per layer. Only the windows differ; "
        "one difference is enough.",
    )
    names = ("window_left", "soft cap", "scale", "sinks")
    d.captions(150, 34, names, w=120)
    for y, layer, window in ((46, "layer a", "-1"), (92, "layer b", "127")):
        d.text(20, y + 22, layer)
        kinds = ("new" if layer == "layer b" else "a", "a", "a", "a")
        words = (window, "None", "0.125", "False")
        d.row(150, y, list(zip(words, kinds, strict=True)), w=120)
    d.text(20, 160, "has_same_window_lefts: False")
    d.text(300, 160, "has_same_all_params: False")
    return d
