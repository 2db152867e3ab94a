"""Shapes and dtypes of all tensors, as type aliases.

These aliases annotate both twins, so a shape is written once. They cost nothing at run time; the
tests enforce them (jaxtyping and beartype). An axis name that appears twice in one signature must
have one size: `reqs` in `block_table` is `reqs` in `seq_lens`.

| axis | counts |
|---|---|
| reqs | requests (sequences) in the batch |
| starts | requests + 1: where each request's tokens start, and where the last one's end |
| tokens | new tokens of the step, concatenated over all requests |
| max_blocks | entries in a row of the block table |
| num_blocks, block_size | blocks in the cache, slots in a block |
| selected | keys that a query names in sparse attention |
| value_head_size | elements of one head's value; may differ from those of its key |
| key_elements, value_elements | those of a cache: half of the numbers if a byte holds two codes |
| index_bytes | bytes per token of the indexer's cache: a code per element, and a scale of 4 |
| latent_width | kv_lora_rank + qk_rope_head_dim, or bytes per record: last axis of a latent cache |
| ... | one number for all, one per kv head, or one per slot and kv head |
| *any | axes of any number and size |
| _ | a buffer that may be longer than its used part; blocks of one of several layers |
"""

from jaxtyping import Bool, Float, Int8, Int32, Int64, Real, UInt8
from torch import Tensor

RawCache = Int8[Tensor, "num_bytes"]
KVCache = Float[Tensor, "2 num_blocks block_size kv_heads head_size"]
LayerKVCache = Real[Tensor, "2 _ block_size kv_heads head_size"]
SourceKVCache = Real[Tensor, "2 source_blocks block_size kv_heads head_size"]
DestinationKVCache = Real[Tensor, "2 destination_blocks block_size kv_heads head_size"]
LayeredKVCache = Float[Tensor, "layers 2 num_blocks block_size kv_heads head_size"]
PackedKVCache = Float[Tensor, "2 num_blocks block_elements"]
PackedKeyCache = Float[Tensor, "num_blocks kv_heads parts block_size part"]
PackedValueCache = Float[Tensor, "num_blocks kv_heads head_size block_size"]
KeyCache = Real[Tensor, "num_blocks block_size kv_heads key_elements"]
ValueCache = Real[Tensor, "num_blocks block_size kv_heads value_elements"]

Query = Float[Tensor, "tokens query_heads head_size"]
Key = Real[Tensor, "tokens kv_heads head_size"]
Value = Real[Tensor, "tokens kv_heads value_head_size"]
RaggedKey = Float[Tensor, "key_tokens kv_heads head_size"]
RaggedValue = Float[Tensor, "key_tokens kv_heads value_head_size"]
Output = Float[Tensor, "tokens query_heads value_head_size"]
PerHead = Float[Tensor, "query_heads"]
PositionBias = Float[Tensor, "query_heads distances"]
Scale = Float[Tensor, "..."]
CausalFlags = Bool[Tensor, "reqs"]
TokenFlags = Bool[Tensor, "tokens"]
TreeMask = Bool[Tensor, "reqs tree tree"]
PartOutputs = Float[Tensor, "parts tokens query_heads value_head_size"]
PartLogSumExps = Float[Tensor, "parts tokens query_heads"]
RankLogSumExp = Float[Tensor, "tokens query_heads"]
LogSumExp = Float[Tensor, "query_heads tokens"]
AnyLogSumExp = Float[Tensor, "*any"]

LatentCache = Real[Tensor, "num_blocks block_size latent_width"]
LatentRows = Float[Tensor, "latent_tokens row_width"]
Latent = Float[Tensor, "tokens kv_lora_rank"]
RopeKey = Float[Tensor, "tokens qk_rope_head_dim"]
NopeQuery = Float[Tensor, "tokens query_heads qk_nope_head_dim"]
RopeQuery = Float[Tensor, "tokens query_heads qk_rope_head_dim"]
KeyUpProjection = Float[Tensor, "query_heads qk_nope_head_dim kv_lora_rank"]
ValueUpProjection = Float[Tensor, "query_heads kv_lora_rank value_head_size"]

IndexKey = Float[Tensor, "tokens index_head_dim"]
IndexCache = UInt8[Tensor, "num_blocks block_size index_bytes"]
IndexQuery = Float[Tensor, "tokens index_heads index_head_dim"]
IndexWeights = Float[Tensor, "tokens index_heads"]
IndexScores = Float[Tensor, "tokens keys"]

BlockTable = Int32[Tensor, "reqs max_blocks"]
BlockCounts = Int32[Tensor, "reqs"]
BlockMapping = Int64[Tensor, "pairs 2"]
SlotMapping = Int64[Tensor, "slots"]
StartLoc = Int32[Tensor, "starts"]
TokenCounts = Int32[Tensor, "reqs"]
WideTokenCounts = Int64[Tensor, "reqs"]
CountsBuffer = Int32[Tensor, "_"]

SpecDecodeQuery = Float[Tensor, "reqs query_len query_heads head_size"]
RankTokenCounts = Int32[Tensor, "reqs ranks"]
Positions = Int64[Tensor, "positions"]
StepPositions = Int64[Tensor, "rows"]
PrefixRanges = Int32[Tensor, "reqs max_ranges 2"]
QueryRanges = Int32[Tensor, "rows 2"]
TokenRanges = Int32[Tensor, "tokens 2"]
TokenRequests = Int32[Tensor, "tokens"]
Selected = Int32[Tensor, "tokens selected"]
SampledTokens = Int32[Tensor, "reqs sampled"]
ProgramChunks = Int32[Tensor, "programs"]
StateBlocks = Int32[Tensor, "reqs state_blocks"]
