"""What a kernel family is: the protocol between dispatch and the kernels of a chip.

A family is one kernel, or a few that always run together, with one role in a batch. Dispatch asks
each family once per call signature whether it supports the calls (`supports`) and for a plan
(`plan`). The plan says which batches it takes, what they cost, and launches them. Dispatch knows
nothing else of a family.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from .attention_call import AttentionCall
from .cost_layer import BatchBounds, Layer


class Role(Enum):
    """What a launch computes of a batch."""

    EVERY = "every request, of any length"
    DECODE = "the short requests, whose rows fit a decode tile, and padding"
    PREFILL = "the long requests"
    PREFIX = "partial results of all queries over a prefix that the requests share"


class Estimate(NamedTuple):
    """What a launch is estimated to take.

    Args:
        time: microseconds, as they are compared with those of other roles. Infinite if the plan is
            not to be chosen.
        division: how the plan divides the work in that time, a number of its own meaning.
    """

    time: float
    division: int = 0


ALWAYS = Estimate(0.0)
"""Estimate of a plan that is chosen for every batch that it takes. It compares with no other."""


class CascadePrefix(NamedTuple):
    """The prefix that all requests of a cascade share, and where partial results are stored.

    Args:
        length: keys of the prefix, at least 1.
        split_len: keys per split.
        begins: index in `workspace` of the values of partial results over the prefix, of the
            log-sum-exps of other partial results, and of their values.
        workspace: float32. Written: log-sum-exps [splits, tokens, heads] in base 2 at its begin,
            and values [splits, tokens, heads, value_size].
        semaphores: int32 counters of finished splits, all 0.
    """

    length: int
    split_len: int
    begins: tuple[int, int, int]
    workspace: Tensor
    semaphores: Tensor


class PrefixWork(NamedTuple):
    """How the work over a prefix is divided, and the memory that it needs besides its results.

    Args:
        split_len: keys per split.
        counters: counters of finished splits per KV head.
        partials: rows of partial results.
    """

    split_len: int
    counters: int = 0
    partials: int = 0


class Task(NamedTuple):
    """What a launch has to compute of its call.

    Args:
        short_rows: rows (queries times group size) of the largest request that another launch
            computes; 0 if there is none.
        division: that of the plan's estimate; 0 if nothing was estimated.
        prefix: Optional. The prefix, for the role PREFIX.
    """

    short_rows: int = 0
    division: int = 0
    prefix: CascadePrefix | None = None


EVERYTHING = Task()
"""All requests of a batch, however the plan divides them."""


class BatchLimits(NamedTuple):
    """Limits of an engine's batches.

    Args:
        num_reqs, max_query_len, max_key_len: requests, and new tokens and keys of each, at most.
        short_rows: rows (queries times group size) of a short request, at most; 0 without decodes.
    """

    num_reqs: int
    max_query_len: int
    max_key_len: int
    short_rows: int = 0


class Warm(NamedTuple):
    """A batch whose launch compiles a kernel.

    Args:
        name: name of the kernel, for a report.
        num_reqs, max_query_len, max_key_len: bounds of the batch.
        task: what is launched.
        kernel: identifies the kernel: of two batches with the same one only the first is launched.
    """

    name: str
    num_reqs: int
    max_query_len: int
    max_key_len: int
    task: Task = EVERYTHING
    kernel: Any = None


class Plan(Protocol):
    """The launches of one family for all calls with one signature.

    Attributes:
        is_repeatable: whether `launch` does nothing on the device but launches through `Launcher`
            and takes memory only from `find_workspace`. Its calls are then repeated
            (runtime/repeat/calls.py).
        takes_all_bounds: Optional. Whether `takes` does not depend on the bounds of a batch. If the
            estimate of such a plan is ALWAYS, a warm-up compiles no other kernel for its calls.

    Some roles require more: PREFILL `clears_padding`, whether the launch clears the rows of no
    request; DECODE `short_rows`, the rows (queries times group size) of a short request, at most;
    PREFIX `is_overlapped`, whether the second launch of a cascade may begin before this one has
    ended, and `divide(call, prefix_len, division)`, which returns the PrefixWork.
    """

    is_repeatable: bool

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out: addresses and sizes."""

    def estimate(self, layer: Layer, batch: BatchBounds) -> Estimate:
        """Return what the launch of a batch takes. Those of two roles are compared or added."""

    def launch(self, call: AttentionCall, task: Task) -> None:
        """Compute the requests of the family's role; `out` and `lse` are modified in place.

        The launch for the role EVERY or DECODE clears the rows of no request.
        """

    def bounds(self, limits: BatchLimits) -> Iterable[Warm]:
        """Return batches that compile every kernel that batches within some limits launch."""


class KernelFamily(NamedTuple):
    """The kernels of one kind of chip for one role.

    Args:
        name: its name in reports, such as "portable decode".
        role: what its launches compute.
        supports: whether the kernels compute calls with this signature.
        plan: returns a plan for all calls with this call's signature, which is supported.
    """

    name: str
    role: Role
    supports: Callable[[AttentionCall], bool]
    plan: Callable[[AttentionCall], Any]
