"""Kernel families: the kernels of one kind of chip, and the lists that dispatch chooses from.

To add kernels for a chip, write a module with `supports(call)` and `plan(call)` in a folder of
`optimized/kernels/`, and enter it in KERNEL_FAMILIES. No other file names it. A module whose plans
compute every request of a call is entered in COMPLETE_FAMILIES, or in APPEND_FAMILIES if the cost
model has to select it. If a plan launches only through `Launcher`, takes memory only from
`find_workspace` and does nothing else on the device, it may have the attribute
`is_repeatable = True`. Its calls are then repeated (repeat/calls.py). If `takes` does not depend on
the bounds of a batch, a plan of COMPLETE_FAMILIES may have the attribute `takes_all_bounds = True`.
The warm-up then compiles no other attention kernel for its calls.
"""

from typing import Protocol

from ..kernels.sm90 import family as sm90
from ..kernels.sm90.append import family as sm90_append
from ..kernels.sm90.fp8_prefill import family as sm90_fp8
from ..kernels.sm90.invariant import family as sm90_invariant
from ..kernels.sm90.latent import family as sm90_latent
from .attention_call import AttentionCall


class PrefillPlan(Protocol):
    """What a kernel family plans for all calls with one signature.

    Attributes:
        clears_padding: whether `launch_prefill` clears the rows of no request if `short_rows` is 0.
            A batch without short requests then needs no decode launch.
        packs_heads: whether short requests have query tiles of all query heads of a KV head, and
            others have not (`cost_packed.py`).
    """

    @property
    def clears_padding(self) -> bool: ...

    @property
    def packs_heads(self) -> bool: ...

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out: addresses and sizes."""

    def launch_prefill(self, call: AttentionCall, short_rows: int) -> None:
        """Compute all requests of more than `short_rows` rows, and leave the others as they are."""

    def prefill_lens(self, least: int, most: int) -> list[int]:
        """Return longest requests of `least` to `most` tokens, each with another kernel."""


class KernelFamily(Protocol):
    """The kernels of one kind of chip."""

    def supports(self, call: AttentionCall) -> bool:
        """Return whether the kernels compute long requests of calls with this signature."""

    def plan(self, call: AttentionCall) -> PrefillPlan:
        """Return a plan for all calls with this call's signature, which is supported."""


KERNEL_FAMILIES: tuple[KernelFamily, ...] = (sm90, sm90_fp8)
"""Kernels of particular chips, in order of preference. Each computes the long requests of a batch.
The portable family, which computes every request of every call, comes after all of them."""


class CompletePlan(Protocol):
    """What a family that computes every request plans for all calls with one signature."""

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out: addresses and sizes."""

    def launch(self, call: AttentionCall) -> None:
        """Compute all requests, and clear the rows of no request."""


class CompleteFamily(Protocol):
    """Kernels of one kind of chip that compute every request of a call."""

    def supports(self, call: AttentionCall) -> bool:
        """Return whether the kernels compute calls with this signature."""

    def plan(self, call: AttentionCall) -> CompletePlan:
        """Return a plan for all calls with this call's signature, which is supported."""


COMPLETE_FAMILIES: tuple[CompleteFamily, ...] = (sm90_latent, sm90_invariant)
"""Kernels of particular chips and kinds of attention, in order of preference. A call that one of
them takes needs no other family."""


class AppendPlan(Protocol):
    """What a family that divides the keys of requests plans for all calls with one signature."""

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Rows of each query tile, fewest first.

        A launch has the first one that has all rows of its longest request, or the last.
        """

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes what a signature leaves out: addresses and sizes."""

    def launch(self, call: AttentionCall, segments: int = 0) -> None:
        """Compute all requests, and clear the rows of no request.

        Args:
            call: one that the plan takes.
            segments: programs per KV head, at most. 0 stands for as many as the chip has.
        """

    def query_lens(self, most: int) -> list[int]:
        """Return longest requests, up to `most` tokens, of which each has another query tile."""


class AppendFamily(Protocol):
    """Kernels of one kind of chip that compute every request of a call and divide its keys."""

    def supports(self, call: AttentionCall) -> bool:
        """Return whether the kernels compute calls with this signature."""

    def plan(self, call: AttentionCall) -> AppendPlan:
        """Return a plan for all calls with this call's signature, which is supported."""


APPEND_FAMILIES: tuple[AppendFamily, ...] = (sm90_append,)
"""Kernels of particular chips that compute every request and split its keys. The cost model selects
them for requests of a few new tokens over long sequences."""
