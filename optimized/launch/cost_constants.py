"""Constants of the cost model (cost_model.py): rates per multiprocessor, and fixed costs.

They are of an H200 (132 multiprocessors), fitted to 27 batches of 1 to 128 requests with 1 to 1,024
new tokens over 700 to 65,536 keys (cold L2, medians of 11). On another chip their ratios matter,
since all paths are estimated with the same ones.
"""

from .launcher import INTERPRETED

DECODE_BYTES_PER_US = 34_500.0
"""Bytes of keys and values that are read: 1.84 us per 128 keys of one head, in batches of 32 to 144
such tiles per multiprocessor."""
WIDE_HEAD_SHARE = 0.87
"""Share of it that Hopper's append kernel reaches with heads of 256: 12 requests of 12 tokens over
6,000 keys take 184 us."""
PREFILL_BYTES_PER_US = 33_000.0
"""The same in prefills, whose programs do not share the keys of a request evenly: 48 requests of 6
tokens over 6,144 keys take 322 us, and 16 of 16 over 16,384 take 282."""
L2_BYTES_PER_US = 64_000.0
"""Bytes that a query tile reads of what another one has read. Assumed: twice the memory's."""
PROGRAM_BYTES_PER_US = 70_000.0
"""Bytes that one program reads at most, if few of them run. Assumed: twice its share of the
memory's."""
PORTABLE_FLOP_PER_US = {16: 0.7e6, 32: 1.1e6, 64: 1.8e6, 128: 3.2e6}
"""Operations of the portable kernels with tiles of so many rows: 16 requests of 16 tokens over
16,384 keys take 789 us with 16 rows, one of 1,024 over 40,960 takes 4,669 with 32 and 1,680 with
128, and 8 of 32 over 8,192 take 174 with 64."""
SMALL_HEAD_SHARE = 0.76
"""Share of these rates with heads of 64, which have twice as many scores per operation: an encoder
of 10 requests of 777 tokens and 12 heads takes 101 us with 128 rows."""
HOPPER_FLOP_PER_US = {64: 4.1e6, 128: 5.35e6}
"""Operations of Hopper's prefill kernel, by head size up to 64 and above: 1,024 tokens over 40,960
keys take 1,006 us, 512 over 32,768 take 422, and with head size 64 16 requests of 16 tokens over
8,192 keys take 123."""
HOPPER_TILE_ROWS = {64: 192, 128: 128}
"""Rows of a query tile of Hopper's kernels, by head size up to 64 and above."""
WARPGROUP_ROWS = 64
"""Rows of a query tile that one warpgroup computes."""
SPLIT_US, PREFILL_US, APPEND_US = 30.0, 25.0, 31.0
"""What the portable append kernel, a decode launch with a prefill launch, and Hopper's append
kernel take besides products and reads: launches, first accesses, write-back of a dirty L2 cache,
tails and combinations."""
COMBINE_US, COMBINED_PARTIALS, COMBINED_ROWS = 2.0, 4, 16
"""So many partial results of so many rows, which Hopper's append kernel combines at once, for head
size 128. One request of 8 tokens over 65,536 keys has 16 of 32 rows per query tile. It took 113 us,
of which 94 are for the rest, when they were loaded one after the other."""
MIN_SEGMENT_TILES = 2
"""KV tiles of a segment of Hopper's append kernel, at least."""
APPEND_WINDOW_US = 12.0
"""What a window adds to Hopper's append kernel: 8 us for 24 requests of 8 tokens and a window of
1,024, 15 us for 10 of 20 tokens and a window of 4,096."""
ROUND_US = 4.0
"""The begin and the end of a work item of a prefill: 64 requests of 6 tokens over 1,024 keys have
four per multiprocessor, and take 102 us."""
TIE_SHARE = 1.015
"""A split is chosen up to this share of the time of a prefill. It is overestimated more, since
ragged batches fill its segments evenly. 24 requests of 1 to 43 tokens over up to 9,493 keys take
193 us, a prefill 282, and the estimates are 358 and 355."""
LAUNCH_US = 5.0
"""One more launch in a CUDA graph: 4.4 us for an empty kernel."""
MAX_SPLIT_TOKENS = 8 if INTERPRETED else 1024
"""New tokens of a request, at most, for which a split is considered."""
MIN_SPLIT_KEYS = 32 if INTERPRETED else 512
"""Keys of a sequence, at least, for which a split is considered: a stream-K segment."""
