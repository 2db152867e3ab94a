"""Layer parameters: the attention settings that one plan must fix for all layers.

Some kernels are planned once per step for all layers. Such a plan fixes window, soft cap and
scale, so it is valid only if the layers share them. The engine collects these settings once, when
it starts, and compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...contract.argument_types import typed
from ...contract.layer_parameters import PerLayerParameters
from ...validation.step_shapes import check_has_layers, check_layer_impl


@typed
def get_per_layer_parameters(
    layers: Mapping[str, object], layer_names: Sequence[str], impl_cls: type
) -> dict[str, PerLayerParameters]:
    """Return the attention settings of each layer.

    Args:
        layers: all layers of the model by name.
        layer_names: layers to include. Layers without an `impl` are ignored.
        impl_cls: class of all their implementations.

    Returns:
        Layer name -> its settings, in the order of the names. The `sliding_window` of an
        implementation is the pair of keys visible to the left and to the right.

    Raises:
        KeyError: the model has no such layer.
        TypeError: an implementation of another class, without a scale, or with a window that is
            not a pair.

    Source:
        vLLM's function of that name.

    Example:
        >>> from types import SimpleNamespace
        >>> impl = SimpleNamespace(scale=0.125, sliding_window=(127, 0))
        >>> get_per_layer_parameters(
        ...     {"a": SimpleNamespace(impl=impl), "norm": object()},
        ...     ["a", "norm"],
        ...     SimpleNamespace,
        ... )["a"].window_left
        127
    """
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


@typed
def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """Return the first layer's settings, and whether all layers have the same.

    Args:
        per_layer_params: result of `get_per_layer_parameters`, not empty.

    Returns:
        A copy of the first entry with both flags set. A difference is not an error: whether it
        matters depends on the kernel, so the planner reads the flags.

    Raises:
        ValueError: the list of layers is empty.

    Source:
        vLLM's function of that name.

    Example:
        >>> shared = infer_global_hyperparameters({
        ...     "a": PerLayerParameters(-1, None, 0.125),
        ...     "b": PerLayerParameters(127, None, 0.125),
        ... })
        >>> shared.window_left, shared.has_same_window_lefts
        (-1, False)
    """
    check_has_layers(per_layer_params)
    # step: take the first layer's parameters
    first, *others = per_layer_params.values()
    # step: compare the others with it
    return replace(
        first,
        has_same_window_lefts=all(
            other.window_left == first.window_left for other in others
        ),
        has_same_all_params=all(other == first for other in others),
    )
