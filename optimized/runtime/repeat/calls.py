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

from contextlib import AbstractContextManager
from typing import Any, final

from torch import Tensor

from ....validation import values_may_be_checked
from ..attention_call import AttentionCall, Signature
from ..launcher import INTERPRETED, RECORDING, current_device, current_stream
from ..plan_cache import SignatureCache
from ..workspace import launch_lock
from .recording import record
from .repeated_call import RepeatedCall
from .signatures import sign_numbers

MAX_ALIKE = 4
"""Repeated calls that are kept per signature: they differ in tensors other than the queries."""


@final
class Anew:
    """Context in which a call is launched that is not repeated; its launches may be recorded.

    No other thread launches on the call's stream meanwhile.

    Args:
        call: the call. Its `scale` and `out` may be None.
        signature: Optional. If None, the launches are not recorded.
        known: repeated calls by signature. A call that can be repeated is added.

    Attributes:
        out: output of the call, set in the context.
    """

    out: Tensor

    def __init__(
        self,
        call: AttentionCall,
        signature: Signature | None = None,
        known: SignatureCache[tuple[RepeatedCall, ...]] | None = None,
    ) -> None:
        self._call, self._signature, self._known = call, signature, known
        self._lock: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        """Wait for other threads on the stream, and begin to record."""
        if not INTERPRETED and self._call.query.get_device() >= 0:
            device = current_device()
            self._lock = launch_lock(device, current_stream(device))
            self._lock.__enter__()
        if self._signature is not None:
            RECORDING.notes = []

    def __exit__(self, *error: Any) -> None:
        """Add the repeated call, and let other threads launch."""
        if self._lock is not None:
            self._lock.__exit__(*error)
        call, signature, known = self._call, self._signature, self._known
        if signature is None or known is None:
            return
        notes, RECORDING.notes = RECORDING.notes, None
        repeated = None
        if error[0] is None and notes is not None:
            repeated = record(notes, call, self.out)
        if repeated is not None:
            alike = known.get(signature) or ()
            others = [one for one in alike if not one.fits(*one.choose(call))]
            known.put(signature, (repeated, *others[: MAX_ALIKE - 1]))


def repeat(
    call: AttentionCall,
    more: Signature,
    known: SignatureCache[tuple[RepeatedCall, ...]],
) -> Tensor | Anew:
    """Launch a call again if a call like it is known, and return its output.

    Args:
        call: the call. Its `scale` and `out` may be None.
        more: what else its launches follow from.
        known: repeated calls by signature.

    Returns:
        the output, or the context in which the call is validated, planned and launched.
    """
    signature = sign_numbers(call, more)
    if signature is None:
        return Anew(call)
    alike = known.get(signature)
    if alike is None:
        # recording takes longer than planning, and the signature may not occur again
        known.put(signature, ())
        return Anew(call)
    for repeated in alike:
        if repeated.fits(*repeated.choose(call)):
            if values_may_be_checked():
                break
            out = call.out
            if out is None:
                out = call.query.new_empty(repeated.out_shape)
            if repeated.launch(call, out):
                return out
            break
    if RECORDING.compiles_only:
        return Anew(call)
    return Anew(call, signature, known)
