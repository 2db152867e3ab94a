"""Laws of invalid arguments of cache operations: they are rejected before anything is written."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..candidates.setting import Setting
from ..cases.batches import NAN
from ..cases.caches import any_bytes
from ..checks.canaries import expect_rejection_without_writes
from .law import law


def invalid_write(**changes: Any) -> Callable[[Any, Tensor], Any]:
    """Return a write that is valid except for some arguments, given as values or functions."""

    def call(candidate: Any, cache: Tensor) -> Any:
        device = cache.device
        given: dict[str, Any] = {
            "key": torch.ones(3, 2, 8, device=device).to(
                changes.get("new", cache.dtype)
            ),
            "key_cache": cache[0],
            "value_cache": cache[1],
            "slot_mapping": torch.tensor([5, -1, 0]),
        }
        given["value"] = given["key"]
        for name, change in changes.items():
            if name in given or name in ("k_scale", "v_scale"):
                given[name] = change(given[name]) if callable(change) else change
        given["slot_mapping"] = given["slot_mapping"].to(device)
        return candidate.reshape_and_cache(**given)

    return call


def invalid_read(**changes: Any) -> Callable[[Any, Tensor], Any]:
    """Return a gather that is valid except for some arguments."""

    def call(candidate: Any, cache: Tensor) -> Any:
        given: dict[str, Any] = {
            "key_cache": cache[0],
            "value_cache": cache[1],
            "block_table": torch.tensor([[2, 1], [0, 9]], dtype=torch.int32),
            "seq_start_loc": torch.tensor([0, 5, 7], dtype=torch.int32),
            "num_tokens": 8,
        }
        for name, change in changes.items():
            given[name] = change(given[name]) if callable(change) else change
        for name in ("block_table", "seq_start_loc"):
            given[name] = given[name].to(cache.device)
        return candidate.gather_cache(**given)

    return call


def invalid_copy(pairs: Any) -> Callable[[Any, Tensor], Any]:
    """Return a copy of these pairs of blocks."""
    return lambda candidate, cache: candidate.copy_blocks([cache], torch.tensor(pairs))


def invalid_swap(pairs: Any) -> Callable[[Any, Tensor], Any]:
    """Return a swap of these pairs of blocks, out of two blocks into a cache of three."""
    return lambda candidate, cache: candidate.swap_blocks(
        cache[:, :2].clone(), cache, torch.tensor(pairs)
    )


def one_block(cache: Tensor) -> Tensor:
    """Return a cache whose blocks are all in one place."""
    return cache[:1].expand_as(cache)


def one_cache(candidate: Any, cache: Tensor) -> Any:
    """Write keys and values to the same cache."""
    return invalid_write(value_cache=cache[0])(candidate, cache)


def overlapping_caches(candidate: Any, cache: Tensor) -> Any:
    """Write to a cache for keys, and to one for values that begins in its last block."""
    blocks = cache.flatten(0, 1)
    write = invalid_write(key_cache=blocks[:3], value_cache=blocks[2:5])
    return write(candidate, cache)


def ints(*numbers: Any) -> Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


E4M3 = torch.float8_e4m3fn
REJECTED: dict[str, tuple[torch.dtype, Callable[[Any, Tensor], Any]]] = {
    name: (torch.float32, call)
    for name, call in {
        "a slot past the last": invalid_write(slot_mapping=torch.tensor([5, 12, 0])),
        "a slot far past the last": invalid_write(
            slot_mapping=torch.tensor([5, 2**33])
        ),
        "two tokens for one slot": invalid_write(slot_mapping=torch.tensor([5, -1, 5])),
        "more slots than tokens": invalid_write(slot_mapping=torch.arange(4)),
        "slots of 32 bits": invalid_write(slot_mapping=ints(5, -1, 0)),
        "slots in two axes": invalid_write(slot_mapping=torch.tensor([[5, -1, 0]])),
        "keys of another dtype": invalid_write(key=lambda key: key.half()),
        "values of another dtype": invalid_write(value=lambda value: value.half()),
        "keys of fewer heads": invalid_write(key=lambda key: key[:, :1]),
        "values of fewer heads": invalid_write(value=lambda value: value[:, :1]),
        "keys of smaller heads": invalid_write(key=lambda key: key[..., :4]),
        "values of smaller heads": invalid_write(value=lambda value: value[..., :4]),
        "fewer values than slots": invalid_write(value=lambda value: value[:2]),
        "a value cache of another dtype": invalid_write(value_cache=torch.Tensor.half),
        "a value cache of fewer blocks": invalid_write(value_cache=lambda c: c[:2]),
        "a value cache of smaller blocks": invalid_write(
            value_cache=lambda c: c[:, :2]
        ),
        "a value cache of fewer heads": invalid_write(
            value_cache=lambda c: c[..., :1, :]
        ),
        "scales for a cache that is not FP8": invalid_write(k_scale=0.5, v_scale=0.5),
        "one cache for keys and values": one_cache,
        "caches that overlap by a block": overlapping_caches,
        "an expanded key cache": invalid_write(key_cache=one_block),
        "an expanded value cache": invalid_write(value_cache=one_block),
        "heads of a cache that overlap": invalid_write(
            value_cache=lambda c: c.as_strided(c.shape, (64, 16, 4, 1))
        ),
        "a copy in an expanded cache": lambda candidate, cache: candidate.copy_blocks(
            [cache[:, :1].expand_as(cache)], torch.tensor([[0, 1]])
        ),
        "a swap into an expanded cache": lambda candidate, cache: candidate.swap_blocks(
            cache.clone(), cache[:, :1].expand_as(cache), torch.tensor([[0, 1]])
        ),
        "a swap of a block that is read and written": lambda candidate, cache: (
            candidate.swap_blocks(cache, cache, torch.tensor([[0, 1], [1, 2]]))
        ),
        "a swap into a part of the source": lambda candidate, cache: (
            candidate.swap_blocks(cache, cache[:, 1:], torch.tensor([[0, 1]]))
        ),
        "values read from another dtype": invalid_read(value_cache=torch.Tensor.half),
        "values read from fewer blocks": invalid_read(value_cache=lambda c: c[:2]),
        "values read from fewer heads": invalid_read(
            value_cache=lambda c: c[..., :1, :]
        ),
        "a used entry past the cache": invalid_read(block_table=ints([2, 3], [0, 9])),
        "a negative used entry": invalid_read(block_table=ints([2, 1], [-1, 9])),
        "a sequence longer than its row": invalid_read(seq_start_loc=ints(0, 9, 9)),
        "starts that do not begin at 0": invalid_read(seq_start_loc=ints(1, 5, 7)),
        "starts that fall": invalid_read(seq_start_loc=ints(0, 5, 4)),
        "sequences that end past the result": invalid_read(num_tokens=6),
        "less than no rows": invalid_read(num_tokens=-1),
        "one start too few": invalid_read(seq_start_loc=ints(0, 5)),
        "starts of 64 bits": invalid_read(seq_start_loc=torch.Tensor.long),
        "a table of 64 bits": invalid_read(block_table=torch.Tensor.long),
        "a dtype for a cache that is not FP8": invalid_read(dtype=torch.float16),
        "scales for numbers as they are": invalid_read(k_scale=0.5, v_scale=0.5),
        "a copy from a block past the last": invalid_copy([[0, 1], [3, 2]]),
        "a copy to a block past the last": invalid_copy([[0, 1], [0, 3]]),
        "a copy from a negative block": invalid_copy([[0, 1], [-1, 2]]),
        "a copy to a negative block": invalid_copy([[0, 1], [0, -1]]),
        "two copies to one block": invalid_copy([[0, 2], [1, 2]]),
        "a block that is read and written": invalid_copy([[0, 1], [1, 2]]),
        "a block that is written and read": invalid_copy([[1, 2], [0, 1]]),
        "a block onto itself": invalid_copy([[1, 1]]),
        "triples of blocks": invalid_copy([[0, 1, 2]]),
        "pairs that are not integers": invalid_copy([[0.0, 1.0]]),
        "a swap from a block past the last": invalid_swap([[0, 1], [2, 0]]),
        "a swap to a block past the last": invalid_swap([[0, 1], [0, 3]]),
        "a swap from a negative block": invalid_swap([[0, 1], [-1, 2]]),
        "a swap to a negative block": invalid_swap([[0, 1], [1, -1]]),
        "two swaps to one block": invalid_swap([[0, 2], [1, 2]]),
        "a swap into blocks of another size": lambda candidate, cache: (
            candidate.swap_blocks(
                cache[:, :, :2].clone(), cache, torch.tensor([[0, 1]])
            )
        ),
        "a swap into another dtype": lambda candidate, cache: candidate.swap_blocks(
            cache.half(), cache, torch.tensor([[0, 1]])
        ),
        "layers of other blocks": lambda candidate, cache: candidate.copy_blocks(
            [cache, cache[:, :, :2].clone()], torch.tensor([[0, 1]])
        ),
        "a second layer with fewer blocks": lambda candidate, cache: (
            candidate.copy_blocks([cache, cache[:, :1].clone()], torch.tensor([[0, 1]]))
        ),
        "keys without values": lambda candidate, cache: candidate.copy_blocks(
            [cache[:1]], torch.tensor([[0, 1]])
        ),
    }.items()
} | {
    name: (E4M3, call)
    for name, call in {
        "an FP8 cache without scales": invalid_write(new=torch.float32),
        "the scale of the keys alone": invalid_write(new=torch.float32, k_scale=0.5),
        "the scale of the values alone": invalid_write(new=torch.float32, v_scale=0.5),
        "a scale of nothing": invalid_write(
            new=torch.float32, k_scale=0.0, v_scale=0.5
        ),
        "a negative scale": invalid_write(new=torch.float32, k_scale=0.5, v_scale=-0.5),
        "a scale that is not a number": invalid_write(
            new=torch.float32, k_scale=NAN, v_scale=0.5
        ),
        "scales of too many heads": invalid_write(
            new=torch.float32, k_scale=torch.ones(3), v_scale=torch.ones(3)
        ),
        "numbers that are FP8 already": invalid_write(k_scale=0.5, v_scale=0.5),
        "a gather in another dtype without scales": invalid_read(dtype=torch.float16),
        "a gather with scales and no dtype": invalid_read(k_scale=0.5, v_scale=0.5),
        "a gather with one scale": invalid_read(k_scale=0.5, dtype=torch.float16),
        "a gather with the other scale": invalid_read(v_scale=0.5, dtype=torch.float16),
        "a gather with a scale of nothing": invalid_read(
            k_scale=0.0, v_scale=0.5, dtype=torch.float16
        ),
        "a gather with a negative scale": invalid_read(
            k_scale=0.5, v_scale=-0.5, dtype=torch.float16
        ),
        "a gather in integers": invalid_read(
            k_scale=0.5, v_scale=0.5, dtype=torch.int32
        ),
        "a gather in FP8 with scales": invalid_read(
            k_scale=0.5, v_scale=0.5, dtype=E4M3
        ),
    }.items()
}


@law(
    "reshape_and_cache",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
    cases=list(REJECTED),
    claim="rejects contents",
)
def invalid_arguments_of_cache_operations_are_rejected_before_any_write(
    setting: Setting, case: str
) -> None:
    """The cache is in the middle of an allocation that is compared, so that a kernel that writes
    past its end is detected and does not crash."""
    dtype, call = REJECTED[case]
    memory = torch.zeros(5000, device=setting.device).to(dtype)
    cache = memory[2000:3000][: 2 * 3 * 4 * 2 * 8].view(2, 3, 4, 2, 8)
    cache.copy_(any_bytes(cache.shape, dtype, 1))
    expect_rejection_without_writes(
        case, lambda: call(setting.candidate, cache), cache=cache
    )
