"""FlashMLA: its sparse operators in vLLM's wheel, over latents and over records of FP8 codes.

`sparse_prefill_fwd` takes any number of queries with a selection each, so it computes decodes too.
`sparse_decode_fwd` reads records of 656 bytes only: FP8 codes of a latent, their scales, and the
rope key in bfloat16. It takes 64 or 128 heads, so vLLM pads the queries.
"""

from typing import Any

import torch
from torch import Tensor

from .....contract.operations import load_implementation
from ...inputs import Inputs
from ...sparse.inputs import SparseInputs
from ..flash_mla import BLOCK_SIZE, FlashMLA
from ..library import Declined, Prepared

RANK, WIDTH = 512, 576
RECORD_BYTES = 656
PADDED_HEADS = (64, 128)


class FlashMLASparse(FlashMLA):
    """FlashMLA's `sparse_prefill_fwd`: latents in bfloat16."""

    operator = "sparse_prefill_fwd"

    def prepare(self, inputs: Inputs) -> Prepared:
        raise Declined("it computes attention over selected latents only")

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        decline_other_latents(inputs, is_small=self.device == "cpu")
        workload = inputs.workload
        latents = inputs.key_cache.flatten(0, 1)
        slots = inputs.slots[:, None]
        options = (workload.scale, workload.value_size, None, None, None)

        def call() -> Tensor:
            found: list[Tensor] = self._decode(inputs.query, latents, slots, *options)
            return found[0]

        return Prepared(call, note="all queries in one call of its prefill")


class FlashMLARecords(FlashMLASparse):
    """FlashMLA's `sparse_decode_fwd`: the same latents as records of FP8 codes."""

    name, title, operator = "flashmla-fp8", "FlashMLA, FP8 records", "sparse_decode_fwd"

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        workload = inputs.workload
        decline_other_latents(inputs, is_small=self.device == "cpu")
        records = self._records(inputs)
        tokens, heads, width = inputs.query.shape
        padded = next((count for count in PADDED_HEADS if count >= heads), heads)
        query = inputs.query.new_zeros(tokens, 1, padded, width)
        query[:, 0, :heads] = inputs.query
        slots = inputs.slots[:, None]
        plan: list[Tensor | None] = [None, None]
        rest = (None, None, None, workload.value_size, workload.scale)
        # older versions have fewer arguments after these
        others = len(self._decode.default._schema.arguments) - 12
        more = (None, False)[:others]

        def attend() -> tuple[Tensor, ...]:
            found: tuple[Tensor, ...] = self._decode(
                query, records, slots, None, None, *plan, *rest, *more
            )
            return found

        plan[:] = attend()[2:4]
        return Prepared(
            lambda: attend()[0],
            rows=lambda out: out[:, 0, :heads],
            note="reads FP8 codes and scales, written in advance; queries padded in advance;"
            " schedule prepared in advance",
            same_work=False,
            rounds_more=True,
        )

    @staticmethod
    def _records(inputs: SparseInputs) -> Tensor:
        """Return [num_blocks, block_size, 1, 656] records of the latents."""
        twin: Any = load_implementation("optimized")
        blocks, size = inputs.key_cache.shape[:2]
        latents = inputs.key_cache.view(-1, WIDTH)
        records = torch.zeros(
            blocks, size, RECORD_BYTES, dtype=torch.uint8, device=inputs.device
        )
        slots = torch.arange(len(latents), device=inputs.device)
        twin.concat_and_cache_mla(latents[:, :RANK], latents[:, RANK:], records, slots)
        return records[:, :, None]


def decline_other_latents(inputs: SparseInputs, is_small: bool) -> None:
    """Decline what is not a cache of latents as the operators take it.

    Args:
        is_small: Whether a tiny version of the workload is run, whose sizes do not matter.

    Raises:
        Declined: The message says why.
    """
    workload = inputs.workload
    if not workload.shares_values:
        raise Declined("it computes attention over selected latents only")
    if is_small:
        return
    if (workload.head_size, workload.value_size) != (WIDTH, RANK):
        raise Declined(f"its latents have {WIDTH} elements, {RANK} of them values")
    if workload.block_size != BLOCK_SIZE:
        raise Declined(f"its blocks have {BLOCK_SIZE} tokens")
