"""RepeatedCall: the launches of all calls that differ in addresses alone."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..attention_call import AttentionCall
from ..launcher import current_device, current_stream, is_profiled
from ..workspace import launch_lock

Step: TypeAlias = Callable[[int, list[int]], Any]
"""A launch or a request for workspace. It gets the stream and the addresses so far, which a request
adds to. A request returns what it found."""


class RepeatedCall:
    """The launches of all calls that differ in addresses alone.

    Args:
        choose: returns the tensors of a call that are not None. Which ones these are is in the
            call's signature.
        fits: whether these tensors are like those of the recorded call.
        device: index of the device.
        out_shape: shape of the output.
        option_names: options that are tensors.
        equal: pairs of indexes of addresses that must be equal.
        steps: launches and requests for workspace, in their order.
    """

    def __init__(
        self,
        choose: Callable[[AttentionCall], tuple[Tensor, ...]],
        fits: Callable[..., bool],
        device: int,
        out_shape: torch.Size,
        option_names: tuple[str, ...],
        equal: tuple[tuple[int, int], ...],
        steps: tuple[Step, ...],
    ) -> None:
        self.choose = choose
        self.fits = fits
        self.device = device
        self.out_shape = out_shape
        self._option_names = option_names
        self._equal = equal
        self._steps = steps

    def launch(
        self,
        call: AttentionCall,
        out: Tensor,
    ) -> bool:
        """Launch a call that fits, whose output is `out`.

        Returns:
            False if nothing was launched, because the addresses are not as recorded.
        """
        (
            query, key, value, block_table, query_start_loc, lengths, _, _, _, _, lse,
            options,
        ) = call  # fmt: skip
        q, k, v, o = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        table = 0 if block_table is None else block_table.data_ptr()
        starts, ends = query_start_loc.data_ptr(), lengths.data_ptr()
        sums = 0 if lse is None else lse.data_ptr()
        union = q | k | v | o | table | starts | ends | sums
        addresses = [q, k, v, table, starts, ends, o, sums]
        for name in self._option_names:
            address = getattr(options, name).data_ptr()
            union |= address
            addresses.append(address)
        if union & 15 or current_device() != self.device or is_profiled():
            return False
        if o in (q, k, v):
            # rejected by the validation
            return False
        for one, other in self._equal:
            if addresses[one] != addresses[other]:
                return False
        stream = current_stream(self.device)
        with launch_lock(self.device, stream):
            # workspace is referenced until the launches are made
            _kept = [step(stream, addresses) for step in self._steps]
        return True
