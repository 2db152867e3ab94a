"""Kernel families of the portable Triton kernels, which compute every call on any CUDA device.

A batch may mix requests of any length. Requests whose rows (queries times the query heads that
share a kv head) fit one decode tile are computed by the decode launch: a stream-K partition of
their KV tiles, or a fixed number of splits of each if they are few. All others are computed by the
prefill launch, one program per tile of rows. Each launch skips the requests of the other one, so
nothing has to be read from the device to separate them. One append launch computes all requests
instead, if that is estimated to take less time.
"""

from ....runtime.attention_call import AttentionCall
from ....runtime.family import KernelFamily, Role
from .cascade import PortablePrefixPlan
from .make_launches import make_launches
from .plans import PortableAppendPlan, PortableDecodePlan, PortablePrefillPlan


def has_decode(call: AttentionCall) -> bool:
    """Return whether the rows of one token fit a decode tile, and need not be batch-invariant."""
    return make_launches(call).has_decode


def is_not_invariant(call: AttentionCall) -> bool:
    """Return whether the splits of a request may depend on the other requests."""
    return not call.options.batch_invariant


def takes_every_signature(call: AttentionCall) -> bool:
    """Return True: `check_supported` has rejected what these kernels do not compute."""
    return True


FAMILIES = (
    KernelFamily("portable append", Role.EVERY, is_not_invariant, PortableAppendPlan),
    KernelFamily("portable decode", Role.DECODE, has_decode, PortableDecodePlan),
    KernelFamily(
        "portable prefill", Role.PREFILL, takes_every_signature, PortablePrefillPlan
    ),
    KernelFamily(
        "portable prefix", Role.PREFIX, takes_every_signature, PortablePrefixPlan
    ),
)
"""One family per role. They take every call that no other family takes."""
