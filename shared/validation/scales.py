"""Validation of scales: what the codes of a cache or of an FP8 output are multiplied by."""

import torch
from torch import Tensor

from ..contract.argument_tensors import reject_gradients
from ..contract.attention_options import AttentionOptions
from ..contract.cache_formats import TENSOR_SCALE_DTYPES
from .primitives import check_dtype, check_same_device

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def check_out_scale(
    options: AttentionOptions, query: Tensor, out: Tensor | None, contents: bool
) -> None:
    """Raise if an FP8 output has no scale, another output has one, or it is out of range."""
    is_quantised = out is not None and out.dtype in TENSOR_SCALE_DTYPES
    if is_quantised and options.out_scale is None:
        raise ValueError(
            "out_scale = None: expected a scale, as out holds FP8 numbers; 1.0 stores the"
            " result as it is"
        )
    if options.out_scale is not None and not is_quantised:
        given = "None" if out is None else str(out.dtype)
        raise ValueError(
            f"out_scale is given but out is {given}: expected a tensor of"
            f" {' or '.join(map(str, TENSOR_SCALE_DTYPES))}"
        )
    check_scale("out_scale", options.out_scale, {"query": query}, None, contents)


def check_scale(
    name: str,
    scale: Tensor | float | None,
    neighbour: dict[str, Tensor],
    heads: int | None,
    contents: bool,
) -> None:
    """Raise if a scale is not one finite number above 0 for all, or one per kv head.

    Args:
        name: Name of the argument.
        scale: What was given.
        neighbour: A tensor that must be on the same device, by its argument's name.
        heads: Number of kv heads. If None, only one number for all is accepted.
        contents: Whether a tensor's numbers are read.
    """
    if scale is None:
        return
    if isinstance(scale, Tensor):
        reject_gradients(**{name: scale})
        check_dtype(name, scale, torch.float32)
        shapes = [[], [1]] if heads is None else [[], [1], [heads]]
        if list(scale.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(
                f"{name} has shape {list(scale.shape)}: expected {expected}"
            )
        check_same_device(**neighbour, **{name: scale})
        numbers = scale.flatten().tolist() if contents else []
    else:
        numbers = [scale]
    for number in numbers:
        # kernels take it in float32, in which 1e-50 is 0 and 1e39 infinite
        if not SMALLEST <= number <= LARGEST:
            raise ValueError(
                f"{name} = {number}: expected a finite number above 0, from {SMALLEST:.3g} to"
                f" {LARGEST:.3g}, the normal numbers of float32"
            )
