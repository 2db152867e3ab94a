"""Rates of a chip's memory, and limits, that the estimates of all families use.

They are of an H200 (132 multiprocessors), fitted to 60 batches of 1 to 128 requests with 1 to 1,024
new tokens over 512 to 131,072 keys (cold L2, medians of 11 and 15). Rates are per multiprocessor.
On another chip the ratios of the constants matter, since all families are estimated with the same
ones.
"""

from .launcher import INTERPRETED

DECODE_BYTES_PER_US = 34_500.0
"""Bytes of keys and values that are read: 1.84 us per 128 keys of one head, in batches of 32 to 144
such tiles per multiprocessor."""
PREFILL_BYTES_PER_US = 31_800.0
"""The same in prefills, whose programs do not share the keys of a request evenly: 48 requests of 6
tokens over 6,144 keys take 322 us, and 16 of 16 over 16,384 take 282."""
L2_BYTES_PER_US = 64_000.0
"""Bytes that a query tile reads of what another one has read. Assumed: twice the memory's."""
PREFILL_PROGRAM_BYTES_PER_US = 51_700.0
"""Bytes that a program of a prefill reads at most, if few of them run: one request of 8 tokens over
2,048 keys takes 43 us, over 65,536 keys 795."""
TIE_SHARE = 1.015
"""Keys are divided up to this share of the time of a prefill, of requests of one length."""
LAUNCH_US = 5.0
"""One more launch in a CUDA graph: 4.4 us for an empty kernel."""
MAX_SPLIT_TOKENS = 8 if INTERPRETED else 1024
"""New tokens of a request, at most, for which a split is considered."""
MIN_SPLIT_KEYS = 32 if INTERPRETED else 512
"""Keys of a sequence, at least, for which a split is considered: a stream-K segment."""
