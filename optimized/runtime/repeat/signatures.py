"""What the launches of a call follow from, except addresses: numbers, options and tensors.

Numbers and options are a hashable signature. Tensors are compared with those of the calls that have
the same one. Torch does that in C, as it compares the tensors of a compiled function: for seven
tensors in 0.7 us, where Python reads their sizes, strides, dtypes and devices in 2.8 us (minimum of
60 x 200, two-core machine).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ..attention_call import AttentionCall, Signature, round_key_bound, sign_options
from ..launcher import INTERPRETED

try:
    # what torch.compile compares the tensors of a compiled function with
    TensorGuards: Any = import_module("torch._C._dynamo.guards").TensorGuards
except (ImportError, AttributeError):
    TensorGuards = None


def sign_numbers(call: AttentionCall, more: Signature = ()) -> Signature | None:
    """Return everything but tensors that the launches of a call follow from.

    Args:
        call: the call. Its `scale` and `out` may be None.
        more: what else its launches follow from.

    Returns:
        a hashable tuple, with the shape of the queries. None if the call is not repeated: in the
        interpreter, if an option is a tensor that belongs to this batch alone, and if the scale is
        an integer.
    """
    (
        query, _, _, block_table, _, _, max_query_len, _, scale, out, lse, options,
    ) = call  # fmt: skip
    if INTERPRETED or (scale is not None and type(scale) is not float):
        return None
    of_options = options.numbers or sign_options(options)
    if of_options is None:
        return None
    return (
        query.shape, block_table is None, out is None, lse is None, max_query_len,
        round_key_bound(call), scale, of_options, more,
    )  # fmt: skip


def sign_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor but its address and contents."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


def make_comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function of as many tensors: whether they are like these.

    Tensors are alike if they have the same types, dtypes, devices, sizes and strides, and if
    autograd would record all of them or none.
    """
    try:
        unique = list({id(tensor): tensor for tensor in tensors}.values())
        guards = TensorGuards(
            *unique,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in unique],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in unique],
        )
        compare: Callable[..., bool] = guards.check
        if len(unique) == len(tensors) and compare(*unique):
            return compare
        if len(unique) == len(tensors) - 1 and compare(*unique):
            # torch rejects a tensor that is given twice, as starts of self-attention are
            return _compare_with_one_twice(tensors, compare)
    except (TypeError, AttributeError):
        # another version of torch
        pass
    known = [_describe(tensor) for tensor in tensors]
    return lambda *others: [_describe(tensor) for tensor in others] == known


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    is_graded = tensor.requires_grad and torch.is_grad_enabled()
    return type(tensor), tensor.device, is_graded, *sign_tensor(tensor)


def _compare_with_one_twice(
    tensors: Sequence[Tensor], compare: Callable[..., bool]
) -> Callable[..., bool]:
    """Return the comparison of tensors of which one is given twice.

    Args:
        tensors: the known tensors.
        compare: compares the tensors without the second one of the two.
    """
    places = [id(tensor) for tensor in tensors]
    again = next(at for at, place in enumerate(places) if place in places[:at])
    first = places.index(places[again])
    return lambda *others: (
        others[first] is others[again]
        and compare(*others[:again], *others[again + 1 :])
    )
