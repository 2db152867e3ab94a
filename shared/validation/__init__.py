"""Validation of arguments: functions that raise an error for invalid input.

Both twins call these functions first, so both raise the same errors, before anything is written.
An error gives the name, the value, the expected value and what to do.

Shapes, dtypes and host numbers are always validated. Contents (is this slot inside the cache?)
must be read from the device. That synchronizes the host and is not allowed during the capture of a
CUDA graph. The reference always reads them, the optimized twin only if `values_checked`. The types
of arguments are validated before, by the annotations (`contract/argument_types.py`).
"""

from .attention import check_encoder_attention as check_encoder_attention
from .attention import check_paged_attention as check_paged_attention
from .batch import LARGEST_ID as LARGEST_ID
from .batch import check_append_blocks as check_append_blocks
from .batch import check_batch as check_batch
from .batch import check_batch_sizes as check_batch_sizes
from .batch import check_block_ids as check_block_ids
from .batch import check_block_rows as check_block_rows
from .batch import check_block_table as check_block_table
from .batch import check_one_sequence as check_one_sequence
from .batch import check_row_reaches as check_row_reaches
from .batch import check_slot_mapping_device as check_slot_mapping_device
from .batch import check_start_loc as check_start_loc
from .cache import check_caches as check_caches
from .cache import check_copy_blocks as check_copy_blocks
from .cache import check_gather_cache as check_gather_cache
from .cache import check_reshape_and_cache as check_reshape_and_cache
from .cache import check_swap_blocks as check_swap_blocks
from .decorator import validated as validated
from .primitives import FLOATS as FLOATS
from .primitives import check_dtype as check_dtype
from .primitives import check_length as check_length
from .primitives import check_not_negative as check_not_negative
from .primitives import check_on_host as check_on_host
from .primitives import check_positive as check_positive
from .primitives import check_same_device as check_same_device
from .primitives import values_checked as values_checked
from .primitives import values_may_be_checked as values_may_be_checked
