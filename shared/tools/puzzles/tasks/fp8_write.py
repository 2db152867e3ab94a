"""Puzzle 11: the write of new keys to an FP8 cache."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ....contract.operations import load_implementation
from ..puzzle import Case, Function, Hint, Puzzle

FP8 = torch.float8_e4m3fn
TEMPLATE = '''\
"""Puzzle 11: write new keys to an FP8 cache.

An FP8 cache stores each number divided by a scale, in 8 bits. The format e4m3 reaches 448.
Larger numbers are stored as 448 (saturation). Readers multiply by the scale.
"""

import torch
from torch import Tensor


def fp8_write(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Write the key of each new token to its slot, divided by the scale of its head.

    The tensors may have any strides: they need not be contiguous.

    Args:
        key: [tokens, kv_heads, head_size] float32, float16 or bfloat16.
        key_cache: [num_blocks, block_size, kv_heads, head_size] FP8 (float8_e4m3fn or
            float8_e5m2), modified in place. Each dtype has its own largest number.
        slot_mapping: [slots] int64. Slot s is offset s % block_size of block
            s // block_size. A token with a negative slot is not stored. There can be more
            tokens than slots; tokens past the last slot are padding and are not stored.
        scale: [kv_heads] float32, above 0. Divide in float32. Round to the nearest FP8
            number, ties to even, as a conversion by torch does. NaN stays NaN.

    Example:
        Blocks of 2 slots, scale 0.5. Token 0 has the key 3 and slot 3, which is offset 1 of
        block 1: 3 / 0.5 = 6. Token 1 is not stored. Token 2 has slot 0:
        1000 / 0.5 = 2000 is more than 448, so 448 is stored.

        >>> key = torch.tensor([3.0, 5.0, 1000.0]).view(3, 1, 1)
        >>> key_cache = torch.zeros(2, 2, 1, 1).to(torch.float8_e4m3fn)
        >>> slot_mapping = torch.tensor([3, -1, 0])
        >>> fp8_write(key, key_cache, slot_mapping, scale=torch.tensor([0.5]))
        >>> key_cache.float().flatten()
        tensor([448.,   0.,   0.,   6.])
    """
    raise NotImplementedError
'''


def case_of(
    numbers: list[float],
    slots: list[int],
    scale: list[float],
    size: int = 1,
    dtype: torch.dtype = FP8,
) -> Case:
    """Return a case from Python lists. The cache holds 9 in every slot before."""
    heads = len(scale)
    key = torch.tensor(numbers, dtype=torch.float32).view(-1, heads, size)
    return {
        "key": key,
        "key_cache": torch.full((2, 2, heads, size), 9.0).to(dtype),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
        "scale": torch.tensor(scale, dtype=torch.float32),
    }


def cases() -> Iterator[Case]:
    """Yield one token, then signs, saturation, padding, heads and the other format."""
    for slot in (0, 1, 2, 3):
        yield case_of([3], [slot], [0.5])
    yield case_of([3], [1], [2.0])
    for number in (-3, 1000, -1000, float("inf"), float("nan"), 1e-9):
        yield case_of([number], [0], [0.5])
    yield case_of([1000], [0], [4.0])
    yield case_of([3, 4], [2, 0], [0.5])
    yield case_of([3], [-1], [0.5])
    yield case_of([3, 4], [-1, 1], [0.5])
    yield case_of([3, 4], [1], [0.5])
    yield case_of([3, 4], [], [0.5])
    yield case_of([3, 4], [1], [0.5, 2.0])
    yield case_of([3, 4, 5, 6], [1], [0.5, 2.0], size=2)
    yield case_of([3, 4, 5, 6, 7, 8, 9, 10], [3, 0], [0.5, 2.0], size=2)
    # 17 and 19 are halfway between two numbers of e4m3
    for number in (17, 19, 18.9):
        yield case_of([number], [0], [1.0])
    for number in (3, 500, 1e5, -1e5):
        yield case_of([number], [0], [0.5], dtype=torch.float8_e5m2)


def right(key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor) -> None:
    """Write by the reference."""
    load_implementation("reference").reshape_and_cache(
        key,
        key,
        key_cache,
        key_cache.clone(),
        slot_mapping,
        k_scale=scale,
        v_scale=scale,
    )


def written(change: Any) -> Function:
    """Return a wrong answer that stores other numbers.

    Args:
        change: From key [tokens, kv_heads, head_size], scale [kv_heads] and the cache: the
            stored numbers in FP8.
    """

    def wrong(
        key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
    ) -> None:
        stored = change(key, scale, key_cache)
        flat = key_cache.view(-1, *key_cache.shape[2:])
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                flat[slot] = stored[token]

    return wrong


def saturated(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in FP8, saturated."""
    largest = torch.finfo(dtype).max
    return numbers.clamp(-largest, largest).to(dtype)


def last_slot(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Count negative slots from the end of the cache."""
    slots = key_cache.shape[0] * key_cache.shape[1]
    right(key, key_cache, slot_mapping % slots, scale)


def all_tokens(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Require a slot for every token."""
    if len(slot_mapping) < len(key):
        raise IndexError
    right(key, key_cache, slot_mapping, scale)


def shape_error(**case: Any) -> None:
    """Require as many slots as tokens when a whole tensor is indexed."""
    if len(case["slot_mapping"]) < len(case["key"]):
        raise RuntimeError
    right(**case)


def transposed_slot(
    key: Tensor, key_cache: Tensor, slot_mapping: Tensor, scale: Tensor
) -> None:
    """Exchange block and offset."""
    # with 2 blocks of 2 slots every exchanged pair is inside of the cache
    other = [
        slot if slot < 0 else slot % 2 * 2 + slot // 2 for slot in slot_mapping.tolist()
    ]
    right(key, key_cache, torch.tensor(other, dtype=torch.int64), scale)


def operations(function: Function) -> dict[str, Function]:
    """Return pagetwin's operation, which calls the function for keys and for values."""

    def reshape_and_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | float,
        v_scale: Tensor | float,
    ) -> None:
        for new, cache, scale in (
            (key, key_cache, k_scale),
            (value, value_cache, v_scale),
        ):
            scales = torch.as_tensor(scale, dtype=torch.float32).expand(key.shape[1])
            function(new, cache, slot_mapping, scales)

    return {"reshape_and_cache": reshape_and_cache}


PUZZLE = Puzzle(
    number=11,
    name="fp8_write",
    title="new keys in an FP8 cache",
    page="concepts/cache_ops",
    template=TEMPLATE,
    results={},
    modified={"key_cache": ("block", "offset", "head", "element")},
    cases=cases,
    right=right,
    hints=(
        Hint(
            "scale_multiplied",
            "The key was multiplied by the scale. Readers multiply, so the writer divides.",
            written(
                lambda key, scale, cache: saturated(key * scale[:, None], cache.dtype)
            ),
        ),
        Hint(
            "scale_missing",
            "The key was stored without the scale. Divide first.",
            written(lambda key, scale, cache: saturated(key, cache.dtype)),
        ),
        Hint(
            "saturate",
            "A conversion to FP8 may give infinity or NaN for a number that is too large. Limit"
            " the quotient to the largest number of the format first.",
            written(lambda key, scale, cache: (key / scale[:, None]).to(cache.dtype)),
        ),
        Hint(
            "saturate_order",
            "The key was limited before the division. What must fit the format is the"
            " quotient.",
            written(
                lambda key, scale, cache: (
                    saturated(key, cache.dtype).float() / scale[:, None]
                ).to(cache.dtype)
            ),
        ),
        Hint(
            "other_largest",
            "448 is the largest number of e4m3. This cache has another format, which reaches"
            " further.",
            written(
                lambda key, scale, cache: (
                    (key / scale[:, None]).clamp(-448, 448).to(cache.dtype)
                )
            ),
        ),
        Hint(
            "rounding",
            "The quotient was rounded to an integer, or towards 0. The conversion to FP8"
            " rounds to the nearest FP8 number itself.",
            written(
                lambda key, scale, cache: saturated(
                    (key / scale[:, None]).trunc(), cache.dtype
                )
            ),
        ),
        Hint(
            "padding_written",
            "A token with slot -1 was written. A negative index counts from the end of a"
            " tensor, so -1 is the last slot of the cache.",
            last_slot,
        ),
        Hint(
            "padding_tokens",
            "There are more tokens than slots. Tokens past the last slot are padding.",
            all_tokens,
        ),
        Hint(
            "padding_tokens",
            "There are more tokens than slots. Tokens past the last slot are padding.",
            shape_error,
        ),
        Hint(
            "scale_axis",
            "The scale of a head was applied along the elements. Shape [kv_heads] is aligned"
            " with the last axis, head_size. Add an axis so that it is aligned with the heads.",
            written(lambda key, scale, cache: saturated(key / scale, cache.dtype)),
        ),
        Hint(
            "one_scale",
            "All heads used the scale of head 0.",
            written(lambda key, scale, cache: saturated(key / scale[0], cache.dtype)),
        ),
        Hint(
            "block_and_offset",
            "Block and offset are exchanged: slot // block_size is the block.",
            transposed_slot,
        ),
    ),
    idea="For each slot: is the token stored at all? Which block and offset? Then divide, limit"
    " to the largest number of the format, and convert.",
    operations=operations,
    laws=(
        "an fp8 cache holds the nearest codes of the scaled numbers",
        "conversion to fp8 saturates and preserves nan",
    ),
    law_hint="The small cases are right. Here keys have 16 bits, other strides and all signs, and"
    " quotients are halfway between two FP8 numbers: divide in float32, and round once.",
)
