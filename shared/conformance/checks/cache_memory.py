"""Memory of caches: numbered bytes, and the comparison of a view with them.

The offset of each element is computed here, axis by axis, and its value is read from the bytes. A
view must have the same value at the same indices and must not copy.
"""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from ...contract.specs import KVCacheSpec
from ..cases.caches import FP8
from .canaries import memory_of, packed
from .expect import Disagreement, expect_same

DTYPES = (torch.float16, torch.bfloat16, torch.float32, *FP8)


def numbered_bytes(count: int, device: torch.device) -> Tensor:
    """Return bytes that differ from their neighbours and are not NaN in any float dtype."""
    return (torch.arange(count) * 7 % 59).to(torch.int8).to(device)


def expect_view(
    what: str,
    found: Tensor,
    raw: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    offset_of: Callable[..., int],
) -> None:
    """Raise if any element of a view is wrong, or if the view is a copy.

    Args:
        what: The name of the view in messages.
        found: The view.
        raw: [bytes] The memory of the view.
        shape, dtype: The expected shape and dtype.
        offset_of: Function that maps the indices of an element to its offset in `raw`, in elements.
    """
    expect_same(f"shape of {what}", tuple(found.shape), tuple(shape))
    elements = raw.cpu().view(torch.uint8).view(-1, dtype.itemsize)
    offsets = [offset_of(*index) for index in product(*map(range, shape))]
    right = elements[torch.tensor(offsets, dtype=torch.int64)].contiguous().view(dtype)
    expect_same(what, packed(found), right.view(shape))
    mine, theirs = memory_of(found).data_ptr(), memory_of(raw).data_ptr()
    if found.numel() and mine != theirs:
        raise Disagreement(
            what, "as a whole", "a copy", "a view of the bytes it is given"
        )


def is_packed_in(order: Sequence[int], shape: Sequence[int]) -> Callable[..., int]:
    """Return a function from indices to the offset in memory, outermost axis first."""

    def offset_of(*index: int) -> int:
        found = 0
        for axis in order:
            found = found * shape[axis] + index[axis]
        return found

    return offset_of


def some_bytes(count: int) -> Tensor:
    """Return zeros."""
    return torch.zeros(count, dtype=torch.int8)


SPEC = KVCacheSpec(4, 2, 8, torch.float16)
PAGE = 2 * 4 * 2 * 8 * 2
