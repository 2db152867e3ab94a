"""Memory forms of tensors: the views of larger tensors that engines pass to kernels.

An engine computes queries, keys and values in one projection, and passes slices of its result. An
output is a part of a larger buffer, and a block table a part of a wider one. Memory between and
around the elements of a view holds NaN, or block ids outside of the cache.
"""

import torch
from torch import Tensor

from ..base.support import Support
from .batches import GARBAGE, LAYOUTS, NAN, empty_cache, heads_of

FORMS = (
    "packed",
    "fused",
    "fused per head",
    "heads first",
    "padded",
    "every other element",
)
"""Forms of [tokens, heads, elements]:

- packed: contiguous.
- fused: rows of all heads with other elements before and after them, as a slice of a QKV tensor.
- fused per head: heads with other elements after each, as a slice of [tokens, heads, 3, elements].
- heads first: a view of [heads, tokens, elements].
- padded: heads with 3 elements between them, so that few addresses are multiples of 16 bytes.
- every other element.
"""
TABLE_FORMS = ("packed", "wider", "every other entry")
"""Forms of a block table: contiguous, or adjacent or other columns of a wider table."""


def laid_out(
    tensor: Tensor, form: str, others: tuple[int, int] = (0, 0), content: float = NAN
) -> Tensor:
    """Return the same numbers as a view of that form.

    Args:
        tensor: [tokens, heads, elements] the numbers.
        form: One of FORMS.
        others: For a fused form, the elements before and after the heads in each row. If both are
            0, two heads before and one after.
        content: What the memory between and around the elements holds.

    Raises:
        ValueError: The form does not exist.
    """
    tokens, heads, size = tensor.shape

    def full(*shape: int) -> Tensor:
        return torch.full(shape, content, dtype=tensor.dtype, device=tensor.device)

    if form == "packed":
        return tensor.contiguous()
    if form == "fused":
        before, after = others if any(others) else (2 * size, size)
        own = slice(before, before + heads * size)
        view = heads_of(full(tokens, own.stop + after)[:, own], heads)
    elif form == "fused per head":
        view = full(tokens, heads, 3, size)[:, :, 0]
    elif form == "heads first":
        view = full(heads, tokens, size).transpose(0, 1)
    elif form == "padded":
        view = full(tokens, heads, size + 3)[..., :size]
    elif form == "every other element":
        view = full(tokens, heads, 2 * size)[..., ::2]
    else:
        raise ValueError(f"form = {form!r}: expected one of {', '.join(FORMS)}")
    return view.copy_(tensor)


def table_laid_out(table: Tensor, form: str) -> Tensor:
    """Return the same block ids as a view of that form, with ids that do not exist around them.

    Args:
        table: [reqs, columns] the block ids.
        form: One of TABLE_FORMS.
    """
    reqs, columns = table.shape
    if form == "packed":
        return table.contiguous()
    shape = reqs, 4 * columns + 4
    wide = torch.full(shape, GARBAGE[0], dtype=table.dtype, device=table.device)
    step = 1 if form == "wider" else 2
    return wide[:, 3 : 3 + step * columns : step].copy_(table)


def nearest_form(name: str, form: str, support: Support) -> str:
    """Return a form of an argument that is supported: this one, if it is, or one near it.

    Args:
        name: The argument: "query", "key", "value", "out" or "block_table".
        form: One of FORMS, or of TABLE_FORMS for a block table.
        support: The declared support.
    """
    is_table = name == "block_table"
    forms = TABLE_FORMS if is_table else FORMS

    def is_supported(other: str) -> bool:
        if is_table:
            view = table_laid_out(torch.zeros(2, 2, dtype=torch.int32), other)
        else:
            view = laid_out(torch.zeros(2, 2, 16, dtype=torch.float16), other)
        return support.why_not_strides({name: view}) is None

    # the forms are in the order of what a kernel needs for them
    nearest = [form, *reversed(forms[1 : forms.index(form)])]
    return next(filter(is_supported, nearest), forms[0])


def nearest_layout(
    layout: str, support: Support, head_size: int, dtype: torch.dtype, turn: int
) -> str:
    """Return a layout of caches whose strides are supported, this one if it is.

    Args:
        layout: One of LAYOUTS.
        support: The declared support.
        head_size, dtype: Those of the caches.
        turn: Selects one of several layouts.
    """

    def is_supported(name: str) -> bool:
        pair = empty_cache(name, 2, 2, 2, head_size, dtype)
        tensors = {"key_cache": pair[0], "value_cache": pair[1]}
        return support.why_not_strides(tensors) is None

    if is_supported(layout):
        return layout
    taken = [layout for layout in LAYOUTS if is_supported(layout)] or list(LAYOUTS)
    return taken[turn % len(taken)]


def words_of_strides(name: str, tensor: Tensor) -> str:
    """Return in words how a tensor that is not packed is stored.

    For instance "query is a view of a fused QKV tensor, row stride 192 elements instead of 64".

    Args:
        name: The argument.
        tensor: [tokens, heads, elements], or [reqs, columns] of a block table.
    """
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        return f"{name} has elements with a stride of {tensor.stride(-1)}"
    if tensor.dim() == 2:
        return (
            f"{name} is a part of a wider table, row stride {tensor.stride(0)} elements"
            f" for {tensor.shape[1]} columns"
        )
    _, heads, size = tensor.shape
    by_token, by_head, _ = tensor.stride()
    if heads > 1 and by_token < by_head:
        return (
            f"{name} is a view of [heads, tokens, {size}], head stride {by_head}"
            f" elements instead of {size}"
        )
    if heads > 1 and by_head != size:
        whole = "a tensor fused per head" if by_head % size == 0 else "padded heads"
        return (
            f"{name} is a view of {whole}, head stride {by_head} elements instead of"
            f" {size}"
        )
    whole = "larger buffer" if name == "out" else "fused QKV tensor"
    return (
        f"{name} is a view of a {whole}, row stride {by_token} elements instead of"
        f" {heads * size}"
    )
