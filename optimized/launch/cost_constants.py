"""Constants of the cost model (cost_model.py): rates per multiprocessor, and fixed costs.

They are of an H200 (132 multiprocessors), fitted to 60 batches of 1 to 128 requests with 1 to 1,024
new tokens over 512 to 131,072 keys (cold L2, medians of 11 and 15). The append kernel was timed
with 148 combinations of a batch, a query tile and a number of segments. On another chip the ratios
of the constants matter, since all paths are estimated with the same ones.
"""

from .launcher import INTERPRETED

DECODE_BYTES_PER_US = 34_500.0
"""Bytes of keys and values that are read: 1.84 us per 128 keys of one head, in batches of 32 to 144
such tiles per multiprocessor."""
APPEND_BYTES_PER_US = 31_000.0
"""The same in Hopper's append kernel: 2 requests of 12 tokens over 100,000 keys take 224 us, and 48
of 6 over 6,144 take 305."""
PREFILL_BYTES_PER_US = 31_800.0
"""The same in prefills, whose programs do not share the keys of a request evenly: 48 requests of 6
tokens over 6,144 keys take 322 us, and 16 of 16 over 16,384 take 282."""
L2_BYTES_PER_US = 64_000.0
"""Bytes that a query tile reads of what another one has read. Assumed: twice the memory's."""
APPEND_TILE_US, PROGRAM_BYTES_PER_US = 0.37, 91_000.0
"""A KV tile of Hopper's append kernel in a program that waits for nothing but its own loads: a
fixed time, and its bytes. One request of 8 tokens over 65,536 keys takes 548 us in one segment per
KV head and 169 in four, and 10 of 7 with head size 64 over 12,000 keys take 216 in four."""
PREFILL_PROGRAM_BYTES_PER_US = 51_700.0
"""Bytes that a program of a prefill reads at most, if few of them run: one request of 8 tokens over
2,048 keys takes 43 us, over 65,536 keys 795."""
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
SPLIT_US, PREFILL_US, PORTABLE_PREFILL_US = 40.0, 13.0, 35.0
"""What the portable append kernel, a decode launch with a prefill launch of Hopper's kernel, and
one with the portable prefill kernel take besides what is counted: launches, first accesses,
write-back of a dirty L2 cache, tails, and the combinations of the first."""
APPEND_US, NARROW_APPEND_US = 21.5, 11.0
"""The same of Hopper's append kernel, and of that kernel with query tiles of WARPGROUP_ROWS rows: 8
of 4 tokens with a group of 16 over 4,096 keys take 45 us and 32, and 1 of 8 over 2,048 33 and
23."""
APPEND_ITEM_US = 2.6
"""The begin and the end of a query tile in a segment of that kernel: 64 requests of 6 tokens over
1,024 keys have four per segment and take 86 us, or eight and take 101."""
CUT_US = 4.9
"""What it takes if query tiles span several segments, besides the rounds of their combination: one
request of 8 tokens over 2,048 keys takes 38 us in one segment and 36 in two, with half of the
keys."""
COMBINE_US, COMBINED_PARTIALS, COMBINED_ROWS = 0.75, 4, 16
"""A round of a combination, and the partial results and rows in it, for head size 128. One request
of 2 tokens with 16 query heads per KV head over 32,768 keys takes 50 us with 64 partial results,
which have 32 rounds, and 38 with 32."""
FEWER_SEGMENTS_SHARE = 0.98
"""Fewer segments than the chip has programs for are chosen below this share of the time with all:
ragged requests, which the estimate does not know, are divided more evenly by more segments."""
MIN_SEGMENT_TILES = 2
"""KV tiles of a segment of Hopper's append kernel, at least."""
APPEND_WINDOW_US = 7.5
"""What a window adds to Hopper's append kernel: 4 requests of 8 tokens and a window of 1,024 take
40 us, with which 24 take 68, and 10 of 20 tokens and a window of 4,096 take 88."""
ROUND_US, PORTABLE_ROUND_US = 6.3, 4.0
"""The begin and the end of a work item of a prefill, of Hopper's kernel and of the portable one: 64
requests of 6 tokens over 1,024 keys have four per multiprocessor, and take 100 us."""
PRODUCTS_ROUND_US = 3.0
"""What overlaps with nothing in each further work item of Hopper's prefill kernel, if its products
take longer than its loads: the last softmax and the output. 16 requests of 128 tokens over 4,096
keys have four per multiprocessor and take 239 us, of which the products are 198. 40 of 44 tokens
over 1,411 with heads of 64 have five, and take 127, of which the products are 83. Without the term
both were underestimated, by 9 and 19 %. These two would need 6 to 7 us, and encoders with five and
nine 1.3 to 2.4: values of 2 and 3 have the least error over 57 batches."""
WINDOW_ROUND_US = 2.0
"""What a window adds to a work item of that kernel: masks at both ends, and one more KV tile if it
begins within one. With a window of 1,024 and one work item per multiprocessor, 6 requests of 7
tokens over 4,199 keys take 35.4 us. With two, 37 of 4 over 2,616 take 62.4, and 24 of 8 over 8,192
take 65.3. Without the term they were estimated to take 31.9, 58.6 and 58.7."""
TIE_SHARE, RAGGED_SHARE = 1.015, 1.15
"""Keys are divided up to this share of the time of a prefill, of requests of one length and of
others. It is overestimated more, since ragged batches fill its segments evenly: 24 requests of 1 to
43 tokens over up to 9,493 keys take 200 us, a prefill 315, and the estimates are 393 and 348."""
LAUNCH_US = 5.0
"""One more launch in a CUDA graph: 4.4 us for an empty kernel."""
MAX_SPLIT_TOKENS = 8 if INTERPRETED else 1024
"""New tokens of a request, at most, for which a split is considered."""
MIN_SPLIT_KEYS = 32 if INTERPRETED else 512
"""Keys of a sequence, at least, for which a split is considered: a stream-K segment."""
