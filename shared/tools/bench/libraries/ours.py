"""pagetwin: the operations of `pagetwin.optimized`."""

from typing import Any

from ....contract.attention_options import AttentionOptions
from ....contract.operations import load_implementation
from ..inputs import Inputs
from .library import AttentionLibrary, Prepared


class Ours(AttentionLibrary):
    """The operations of `pagetwin.optimized`."""

    name, title = "ours", "pagetwin"

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        twin: Any = load_implementation("optimized")
        if workload.kind == "write":
            return Prepared(
                lambda: twin.reshape_and_cache(
                    inputs.key,
                    inputs.value,
                    inputs.key_cache,
                    inputs.value_cache,
                    inputs.slot_mapping,
                )
            )
        out = inputs.fresh()
        lens = (inputs.max_query_len, inputs.max_seq_len)
        if workload.kind == "encoder":
            starts = inputs.query_start_loc
            return Prepared(
                lambda: twin.encoder_attention(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    starts,
                    starts,
                    *lens,
                    out=out,
                )
            )
        scale = 1.0 if workload.is_quantised else None
        options = AttentionOptions(
            causal=workload.causal,
            sliding_window=workload.sliding_window,
            k_scale=scale,
            v_scale=scale,
        )
        return Prepared(
            lambda: twin.paged_attention(
                inputs.query,
                inputs.key_cache,
                inputs.value_cache,
                inputs.block_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                *lens,
                out=out,
                options=options,
            )
        )
