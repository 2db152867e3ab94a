"""Repeated cache writes: the launch of one write, made again with other addresses and tokens.

The layers of a model write the same shapes in every step. Validation, sizes and the compiled kernel
follow from what is equal, and from step to step only the number of tokens differs. So a signature
leaves out addresses and tokens, and each write checks both: the addresses of new tokens and slots
are multiples of 16, those of caches and scales have the recorded remainders, for which the kernel
is specialized, there are as many new tokens as slots or more, keys and values are written to
different addresses, the current device is the recorded one, and no profiler has hooks. A write that
differs is validated and launched as before.

A repeated write holds sizes and a kernel, no tensors, and is never changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..attention_call import Signature
from ..direct_launch import DirectLaunch, find_direct_launch
from ..launcher import INTERPRETED, current_device, current_stream, is_profiled
from ..plan_cache import SignatureCache
from .signatures import sign_tensor

Scale: TypeAlias = Tensor | float | None

WRITES: "SignatureCache[RepeatedWrite]" = SignatureCache(64)


@dataclass(frozen=True)
class RepeatedWrite:
    """The launch of all writes with one signature.

    Args:
        direct: the driver launch of the compiled kernel.
        tokens_per_program: tokens that a program writes.
        programs_per_token: programs that write the same tokens.
        new_sizes: for both tensors of new tokens, what the kernel takes after their address.
        cache_sizes: for each cache, what the kernel takes after its address and scale.
        remainders: for each cache, those of its address and of its scale's by 16.
        rest: the kernel's arguments after the number of slots.
        measures_scales: whether the scales are written too.
    """

    direct: DirectLaunch
    tokens_per_program: int
    programs_per_token: int
    new_sizes: tuple[tuple[Any, ...], ...]
    cache_sizes: tuple[tuple[Any, ...], ...]
    remainders: tuple[tuple[int, int], ...]
    rest: tuple[Any, ...]
    measures_scales: bool = False

    def launch(
        self,
        new: Sequence[Tensor],
        caches: Sequence[Tensor],
        slot_mapping: Tensor,
        scales: Sequence[Scale],
    ) -> bool:
        """Launch a write with this signature; the arguments are those of `sign_write`.

        Returns:
            False if nothing was launched, because the addresses, the tokens or the device are not
            as this launch needs them.
        """
        one, other = new
        num_slots, tokens = slot_mapping.shape[0], one.shape[0]
        if not 0 < num_slots <= tokens or other.shape[0] != tokens:
            return False
        first, second, slots = one.data_ptr(), other.data_ptr(), slot_mapping.data_ptr()
        union = first | second | slots
        arguments = [(first, *self.new_sizes[0]), (second, *self.new_sizes[1])]
        earlier = earlier_scale = 0
        for tensor, scale, sizes, (remainder, of_scale_remainder) in zip(
            caches, scales, self.cache_sizes, self.remainders, strict=True
        ):
            address = tensor.data_ptr()
            if address == earlier:
                return False
            earlier = address
            union |= address - remainder
            if scale is None:
                arguments.append((address, None, *sizes))
            elif isinstance(scale, Tensor):
                of_scale = scale.data_ptr()
                if of_scale == earlier_scale:
                    return False
                if self.measures_scales:
                    earlier_scale = of_scale
                union |= of_scale - of_scale_remainder
                arguments.append((address, of_scale, *sizes))
            else:
                arguments.append((address, float(scale), *sizes))
        direct = self.direct
        if union & 15 or current_device() != direct.device or is_profiled():
            return False
        per_program = self.tokens_per_program
        direct.start(
            ((num_slots + per_program - 1) // per_program, self.programs_per_token, 1),
            current_stream(direct.device),
            (*arguments, slots, num_slots, *self.rest),
        )
        return True


def sign_write(
    new: Sequence[Tensor],
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    scales: Sequence[Scale],
    *more: str | float | None,
) -> Signature | None:
    """Return everything that the launch of a write follows from, except addresses and tokens.

    Args:
        new: two tensors that are written, one row per token.
        caches: where it is written.
        slot_mapping: slots of the first tokens.
        scales: of each cache.
        more: what else its launch follows from: the name of the caches' format, and global scales.

    Returns:
        a hashable tuple. None if the write is not repeated: in the interpreter, and if autograd
        would record it.
    """
    if INTERPRETED:
        return None
    one, other = new
    records = torch.is_grad_enabled()
    if records and (
        one.requires_grad
        or other.requires_grad
        or caches[0].requires_grad
        or caches[-1].requires_grad
    ):
        return None
    return (
        one.shape[1:], one.stride(), one.dtype, one.get_device(),
        other.shape[1:], other.stride(), other.dtype, other.get_device(),
        *[sign_tensor(cache) for cache in caches],
        slot_mapping.stride(), slot_mapping.dtype, slot_mapping.get_device(),
        *[
            (*sign_tensor(scale), records and scale.requires_grad)
            if isinstance(scale, Tensor) else scale
            for scale in scales
        ],
        *more,
    )  # fmt: skip


def record_write(
    signature: Signature | None,
    compiled: Any,
    tokens_per_program: int,
    programs_per_token: int,
    arguments: Sequence[Any],
) -> None:
    """Keep the launch of a write, if writes with its signature can be repeated.

    Args:
        signature: Optional. Of the write. If None, it is not kept.
        compiled: Optional. The kernel that Triton compiled for it. If None, it is not kept.
        tokens_per_program, programs_per_token: as in `RepeatedWrite`.
        arguments: all arguments of the kernel, in order. Those before the slots are NamedTuples:
            two tensors of new tokens, then the caches with their scales. The number of slots
            follows the slots.
    """
    if compiled is None or signature is None:
        return
    first = next(
        at for at, argument in enumerate(arguments) if isinstance(argument, Tensor)
    )
    tensors, slots, rest = arguments[:first], arguments[first], arguments[first + 2 :]
    new, caches = tensors[:2], tensors[2:]
    aligned = [slots, *(tensor[0] for tensor in new)]
    direct = find_direct_launch(compiled, current_device())
    if direct is None or any(pointer.data_ptr() & 15 for pointer in aligned):
        return
    made = RepeatedWrite(
        direct,
        tokens_per_program,
        programs_per_token,
        tuple(tuple(tensor[1:]) for tensor in new),
        tuple(tuple(cache[2:]) for cache in caches),
        tuple((_remainder(cache[0]), _remainder(cache.scale)) for cache in caches),
        tuple(rest),
        # those that are given have one axis at most
        any(
            isinstance(cache.scale, Tensor) and cache.scale.dim() > 1
            for cache in caches
        ),
    )
    WRITES.put(signature, made)


def _remainder(pointer: Any) -> int:
    """Return the remainder of a tensor's address by 16, and 0 for a number."""
    return pointer.data_ptr() & 15 if isinstance(pointer, Tensor) else 0
