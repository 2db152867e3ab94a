"""Kernel family of Hopper chips (compute capability 9.0): prefill launches."""

from ...launch.attention_call import AttentionCall
from . import host


def supports(call: AttentionCall) -> bool:
    """Return whether the kernel can run calls with this call's signature on its device."""
    return host.supports(
        call.query, call.key, call.value, call.block_table, call.out, call.options
    )


def plan(call: AttentionCall) -> "Sm90Plan":
    """Return the launch plan of all calls with this call's signature."""
    return Sm90Plan(
        host.plan(
            call.query, call.key, call.value, call.block_table, call.out, call.options
        )
    )


class Sm90Plan:
    """Launches of the Hopper prefill kernel for calls with one signature.

    Args:
        prefill: the launcher, and the layout of the tensors.
    """

    def __init__(self, prefill: host.PrefillPlan) -> None:
        self._prefill = prefill

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes this call's addresses, sizes and scale."""
        return host.accepts(
            self._prefill,
            call.query,
            call.key,
            call.value,
            call.block_table,
            call.out,
            call.lse,
            call.scale,
        )

    def launch_prefill(self, call: AttentionCall, short_rows: int) -> None:
        """Compute all requests of more than `short_rows` rows (queries times group size)."""
        host.launch(
            self._prefill,
            call.query,
            call.key,
            call.value,
            call.block_table,
            call.query_start_loc,
            call.lengths,
            call.max_query_len,
            short_rows,
            call.scale,
            call.out,
            call.lse,
        )
