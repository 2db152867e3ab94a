"""The twelve puzzles, one file per puzzle, in the order of difficulty."""

from ..puzzle import Puzzle
from . import (
    append_blocks,
    cascade,
    causal_mask,
    combine_splits,
    cross_attention_lengths,
    decode_kernel,
    fp8_write,
    gather,
    gqa,
    online_softmax,
    sliding_window,
    slot_mapping,
)

PUZZLES: tuple[Puzzle, ...] = (
    slot_mapping.PUZZLE,
    append_blocks.PUZZLE,
    gather.PUZZLE,
    causal_mask.PUZZLE,
    sliding_window.PUZZLE,
    online_softmax.PUZZLE,
    gqa.PUZZLE,
    combine_splits.PUZZLE,
    cross_attention_lengths.PUZZLE,
    cascade.PUZZLE,
    fp8_write.PUZZLE,
    decode_kernel.PUZZLE,
)
