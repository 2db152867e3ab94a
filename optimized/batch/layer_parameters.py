"""Do all layers attend alike, so that one plan serves them?

Read once, when the engine starts: there is nothing to make faster, and this file is the reference's
word for word.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...contract.layer_parameters import PerLayerParameters
from ...validation.step_shapes import check_has_layers, check_layer_impl


def get_per_layer_parameters(
    layers: Mapping[str, object], layer_names: Sequence[str], impl_cls: type
) -> dict[str, PerLayerParameters]:
    """Return what each layer's plan would have to fix."""
    found = {}
    for name in layer_names:
        if name not in layers:
            raise KeyError(f"layer {name!r}: expected one of {', '.join(layers)}")
        impl = getattr(layers[name], "impl", None)
        if impl is None:
            continue
        check_layer_impl(name, impl, impl_cls)
        window = getattr(impl, "sliding_window", None)
        found[name] = PerLayerParameters(
            window_left=-1 if window is None else window[0],
            logits_soft_cap=getattr(impl, "logits_soft_cap", None),
            sm_scale=impl.scale,
            has_sinks=getattr(impl, "sinks", None) is not None,
        )
    return found


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """Return the first layer's numbers, and whether all layers have them."""
    check_has_layers(per_layer_params)
    # step: take the first layer as the measure
    first, *others = per_layer_params.values()
    # step: hold the others against it
    return replace(
        first,
        has_same_window_lefts=all(
            other.window_left == first.window_left for other in others
        ),
        has_same_all_params=all(other == first for other in others),
    )
