"""Repeated cache writes: the launch of one write, made again with other addresses.

The layers of a model write the same shapes in every step. Validation, grid, sizes and the compiled
kernel follow from what is equal. What an exact signature leaves out is checked at each write: every
address is a multiple of 16, for which the kernel is specialized, the current device is the recorded
one, and no profiler has hooks. A write that differs is validated and launched as before.

A repeated write holds sizes and a kernel, no tensors, and is never changed.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from ..attention_call import Signature
from ..direct_launch import DirectLaunch, find_direct_launch
from ..launcher import (
    INTERPRETED,
    current_device,
    current_stream,
    is_profiled,
)
from ..plan_cache import SignatureCache
from .signatures import sign_tensor

Scale: TypeAlias = Tensor | float | None

WRITES: "SignatureCache[RepeatedWrite]" = SignatureCache(64)


@dataclass(frozen=True)
class RepeatedWrite:
    """The launch of all writes with one exact signature.

    Args:
        direct: the driver launch of the compiled kernel.
        grid: programs along each axis.
        sizes: of new keys, new values, the key cache and the value cache: all that the kernel
            takes after their address, or after their address and scale.
        rest: the kernel's arguments after the slots.
    """

    direct: DirectLaunch
    grid: tuple[int, int, int]
    sizes: tuple[tuple[Any, ...], ...]
    rest: tuple[Any, ...]

    def launch(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Scale,
        v_scale: Scale,
    ) -> bool:
        """Launch a write with this exact signature.

        Returns:
            False if nothing was launched, because the addresses or the device are not as recorded.
        """
        new_k, new_v, slots = key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr()
        k, v = key_cache.data_ptr(), value_cache.data_ptr()
        scale_k, scale_v = _lower(k_scale), _lower(v_scale)
        union = new_k | new_v | slots | k | v
        for scale in (scale_k, scale_v):
            if isinstance(scale, int):
                union |= scale
        if union & 15 or current_device() != self.direct.device or is_profiled():
            return False
        of_key, of_value, of_key_cache, of_value_cache = self.sizes
        self.direct.start(
            self.grid,
            current_stream(self.direct.device),
            (
                (new_k, *of_key),
                (new_v, *of_value),
                (k, scale_k, *of_key_cache),
                (v, scale_v, *of_value_cache),
                slots,
                *self.rest,
            ),
        )
        return True


def sign_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> Signature | None:
    """Return everything that the launch of a write follows from, except addresses.

    Returns:
        a hashable tuple. None in the interpreter, where writes are not repeated.
    """
    if INTERPRETED:
        return None
    return (
        *sign_tensor(key),
        *sign_tensor(value),
        *sign_tensor(key_cache),
        *sign_tensor(value_cache),
        *sign_tensor(slot_mapping),
        sign_tensor(k_scale) if isinstance(k_scale, Tensor) else k_scale,
        sign_tensor(v_scale) if isinstance(v_scale, Tensor) else v_scale,
    )


def record_write(
    signature: Signature, compiled: Any, grid: tuple[int, int], arguments: Any
) -> None:
    """Keep the launch of a write, if writes with its signature can be repeated.

    Args:
        signature: of the write.
        compiled: Optional. The kernel that Triton compiled for it. If None, the write is not kept.
        grid: programs along both axes.
        arguments: all arguments of the kernel, in order.
    """
    if compiled is None:
        return
    new_key, new_value, key_cache, value_cache, slots, *rest = arguments
    tensors = [each[0] for each in (new_key, new_value, key_cache, value_cache)]
    scales = [each[1] for each in (key_cache, value_cache)]
    pointers = [*tensors, slots, *(each for each in scales if isinstance(each, Tensor))]
    direct = find_direct_launch(compiled, current_device())
    if direct is None or any(each.data_ptr() & 15 for each in pointers):
        return
    sizes = (new_key[1:], new_value[1:], key_cache[2:], value_cache[2:])
    made = RepeatedWrite(direct, (*grid, 1), tuple(map(tuple, sizes)), tuple(rest))
    WRITES.put(signature, made)


def _lower(scale: Scale) -> float | int | None:
    """Return a scale as a kernel's argument: a number, an address (int), or None."""
    if isinstance(scale, Tensor):
        return scale.data_ptr()
    return None if scale is None else float(scale)
