"""Exact signatures: everything that the launches of a call follow from, except addresses.

Python reads sizes, strides, dtypes and devices of seven tensors in 2.8 us; torch compares them with
known ones in 0.7 us (minimum of 60 x 200, two-core machine). So a call is first compared with the
newest one that has the same numbers, options and query shape.
"""

from collections.abc import Callable
from importlib import import_module
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from ..attention_call import AttentionCall, Signature, sign_options
from ..launcher import INTERPRETED
from .repeated_call import RepeatedCall

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
        interpreter, if an option is a tensor that belongs to this batch alone, and with numbers of
        other types.
    """
    (
        query, _, _, block_table, _, _, max_query_len, max_key_len, scale, out, lse,
        options,
    ) = call  # fmt: skip
    if (
        INTERPRETED
        or type(max_query_len) is not int
        or type(max_key_len) is not int
        or (scale is not None and type(scale) is not float)
    ):
        return None
    of_options = options.numbers or sign_options(options)
    if of_options is None:
        return None
    return (
        query.shape, block_table is None, out is None, lse is None, max_query_len,
        max_key_len, scale, of_options, more,
    )  # fmt: skip


def sign_exactly(call: AttentionCall, numbers: Signature) -> Signature:
    """Return everything that the launches of a call follow from, except addresses.

    Args:
        call: the call.
        numbers: what `sign_numbers` returned.
    """
    tensors = (*call[:6], call.out, call.lse)
    return numbers, *(None if each is None else sign_tensor(each) for each in tensors)


def sign_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor but its address and contents."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()


class GuardedCall(NamedTuple):
    """A repeated call, and a comparison with the tensors that it was recorded with.

    Args:
        choose: returns the tensors of a call that are not None. Which ones these are is in the
            signature of its numbers.
        fits: whether tensors have the same types, dtypes, devices, sizes and strides.
        repeated: the repeated call.
    """

    choose: Callable[[AttentionCall], tuple[Tensor, ...]]
    fits: Callable[..., bool]
    repeated: RepeatedCall


def guard(call: AttentionCall, repeated: RepeatedCall) -> GuardedCall | None:
    """Return a repeated call with a comparison of tensors; None if torch does not have one.

    Args:
        call: a call that is repeated.
        repeated: its launches.
    """
    at = [index for index, each in enumerate(call[:11]) if isinstance(each, Tensor)]
    choose = itemgetter(*at)
    tensors = choose(call)
    try:
        guards = TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(each.shape) for each in tensors],
            dynamic_dims_strides=[list(each.stride()) for each in tensors],
        )
        if guards.check(*tensors):
            return GuardedCall(choose, guards.check, repeated)
    except (TypeError, AttributeError):
        # another version of torch
        pass
    return None
