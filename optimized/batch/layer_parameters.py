"""Layer parameters: the attention settings that one plan must fix for all layers."""

from ...reference.batch.layer_parameters import (
    get_per_layer_parameters,
    infer_global_hyperparameters,
)

__all__ = ["get_per_layer_parameters", "infer_global_hyperparameters"]
