"""What can differ from layer to layer, although one plan serves them all?"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PerLayerParameters:
    """One layer's numbers that a kernel's plan depends on (vLLM's name).

    Args:
        window_left: keys seen to the left of a query, itself not counted; -1: all.
        logits_soft_cap: scores are squeezed into plus or minus this; None: they are not.
        sm_scale: what scores are multiplied with.
        has_sinks: each head has a score of its own that takes weight and gives no value.
        has_same_window_lefts: whether all layers of the model have this window; None: not
            asked yet. Says nothing about the layer, so two layers are equal without it.
        has_same_all_params: whether all layers have all of these numbers.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    has_sinks: bool = False
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)
