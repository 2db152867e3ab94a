"""Kernel family of Hopper chips (compute capability 9.0): prefill launches."""

from ...launch.attention_call import AttentionCall
from ...launch.tuning import is_hopper
from .prefill import Prompts, launch, prepare, takes


def supports(call: AttentionCall) -> bool:
    """Return whether the call runs on a chip with this kernel.

    Batch-invariant rows need one summation order for requests of all lengths, which this kernel
    does not share with the decode launch of the portable family.
    """
    return is_hopper(call.query.device) and not call.options.batch_invariant


def plan(call: AttentionCall) -> "Sm90Plan | None":
    """Return the launch plan of all calls with this call's signature.

    Returns:
        None if the kernel does not compute such calls.
    """
    prompts = prepare(
        call.query, call.key, call.value, call.block_table, call.out, call.options
    )
    return None if prompts is None else Sm90Plan(prompts)


class Sm90Plan:
    """Launches of the Hopper prefill kernel for calls with one signature.

    Args:
        prompts: the launcher, and the layout of the tensors.
    """

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def takes(self, call: AttentionCall) -> bool:
        """Return whether the kernel takes this call's addresses, sizes and scale."""
        return takes(
            self._prompts,
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
        launch(
            self._prompts,
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
