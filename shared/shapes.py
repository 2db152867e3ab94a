"""What shape and dtype does each tensor have?

These aliases annotate both twins, so a shape is written once and read everywhere. They cost
nothing at run time; the tests enforce them (jaxtyping and beartype), so that a shape in the
documentation cannot go stale. An axis name that appears twice in one signature must have one
size: `reqs` in `block_table` is `reqs` in `seq_lens`.

| axis | counts |
|---|---|
| reqs | requests (sequences) in the batch |
| starts | requests + 1: where each request's tokens start, and where the last one's end |
| tokens | new tokens of the step, all requests one after another |
| max_blocks | entries in a row of the block table |
| num_blocks, block_size | blocks in the cache, slots in a block |
"""

from jaxtyping import Float, Int8, Int32, Int64
from torch import Tensor

RawCache = Int8[Tensor, "num_bytes"]
KVCache = Float[Tensor, "2 num_blocks block_size kv_heads head_size"]
SourceKVCache = Float[Tensor, "2 source_blocks block_size kv_heads head_size"]
DestinationKVCache = Float[Tensor, "2 destination_blocks block_size kv_heads head_size"]
KeyCache = Float[Tensor, "num_blocks block_size kv_heads head_size"]
ValueCache = Float[Tensor, "num_blocks block_size kv_heads head_size"]

Query = Float[Tensor, "tokens query_heads head_size"]
Key = Float[Tensor, "tokens kv_heads head_size"]
Value = Float[Tensor, "tokens kv_heads head_size"]
Output = Float[Tensor, "tokens query_heads head_size"]
LogSumExp = Float[Tensor, "query_heads tokens"]

BlockTable = Int32[Tensor, "reqs max_blocks"]
BlockCounts = Int32[Tensor, "reqs"]
BlockMapping = Int64[Tensor, "pairs 2"]
SlotMapping = Int64[Tensor, "slots"]
StartLoc = Int32[Tensor, "starts"]
TokenCounts = Int32[Tensor, "reqs"]
