"""The attention settings of one layer that a kernel's plan depends on."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PerLayerParameters:
    """The attention settings of one layer (vLLM's name).

    Args:
        window_left: number of visible keys to the left of a query, without the query's own; -1
            if all are visible.
        logits_soft_cap: Optional. Bound of the scores. If None, they are not capped.
        sm_scale: factor of the scores.
        has_sinks: whether each head has a sink: a score with weight and without a value.
        has_same_window_lefts: Optional. Whether all layers of the model have this window. If
            None, it is unknown. It is not a property of the layer and does not affect equality.
        has_same_all_params: Optional. Whether all layers have all of these settings.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)
