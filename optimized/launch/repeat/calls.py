"""Repeated calls: the launches of one call, made again with other addresses.

The layers of a model make the same call in every step: shapes, strides, bounds and options are
equal, and only addresses differ. Kernels, grids, sizes and the choice of a path follow from what is
equal. So the launches of one call are recorded, and later calls like it fill in addresses and call
the driver's launch directly.

A call is recorded when the signature of its numbers and options occurs for the second time
(signatures.py). Recording demands that a call does nothing on the device but launches through
`Launcher` and requests through `find_workspace`, and that each pointer is the address of a tensor
of the call, of an option, or in the workspace (recording.py). Other calls are not repeated. What a
signature leaves out is checked at each call, and a call that differs is planned and launched as
before:

- Its tensors have the dtypes, devices, sizes and strides of the recorded ones.

- Every address is a multiple of 16, because the recorded kernels are specialized for that.
- Tensors that share an address when the call was recorded share one again, since their pointers
  cannot be told apart.
- The current device is the recorded one, and no profiler has hooks.

Tensor maps depend on addresses. They come from the launch plan, which keeps them, and a repeated
call keeps those of the combinations of addresses that it has seen.

A repeated call holds sizes, kernels and tensor maps, no tensors. Several threads may launch one:
nothing in it changes but the dictionary of tensor maps, of which each operation is atomic. On one
stream a thread waits until another one has made all launches of its call, because they share the
stream's workspace.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ....validation import values_checked
from ..attention_call import AttentionCall, Signature
from ..launcher import INTERPRETED, RECORDING, current_device, current_stream
from ..plan_cache import SignatureCache
from ..workspace import launch_lock
from .recording import record
from .repeated_call import RepeatedCall
from .signatures import sign_numbers

MAX_ALIKE = 4
"""Repeated calls that are kept per signature: they differ in tensors other than the queries."""


def repeat_or_record(
    call: AttentionCall,
    more: Signature,
    known: SignatureCache[tuple[RepeatedCall, ...]],
    anew: Callable[..., Tensor],
    *arguments: Any,
) -> Tensor:
    """Launch a call, again if a call like it is known, and return its output.

    Args:
        call: the call. Its `scale` and `out` may be None.
        more: what else its launches follow from.
        known: repeated calls by signature. A call that can be repeated is added.
        anew: validates, plans and launches a call that is not known.
        arguments: of `anew`, after the call.
    """
    signature = sign_numbers(call, more)
    if signature is None:
        return _launch_alone(call, anew, *arguments)
    alike = known.get(signature)
    if alike is None:
        # recording takes longer than planning, and the signature may not occur again
        known.put(signature, ())
        return _launch_alone(call, anew, *arguments)
    for each in alike:
        if each.fits(*each.choose(call)):
            if values_checked():
                break
            out = call.out
            if out is None:
                out = call.query.new_empty(each.out_shape)
            if each.launch(call, out):
                return out
            break
    if RECORDING.compiles_only:
        return _launch_alone(call, anew, *arguments)
    RECORDING.notes = []
    try:
        result = _launch_alone(call, anew, *arguments)
        repeated = record(RECORDING.notes, call, result)
    finally:
        RECORDING.notes = None
    if repeated is not None:
        others = [each for each in alike if not each.fits(*each.choose(call))]
        known.put(signature, (repeated, *others[: MAX_ALIKE - 1]))
    return result


def _launch_alone(
    call: AttentionCall, anew: Callable[..., Tensor], *arguments: Any
) -> Tensor:
    """Plan and launch a call while no other thread launches on its stream."""
    if INTERPRETED or call.query.get_device() < 0:
        return anew(call, *arguments)
    device = current_device()
    with launch_lock(device, current_stream(device)):
        return anew(call, *arguments)
