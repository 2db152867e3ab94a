"""The widths of multi-head latent attention.

The cache holds, per token, one vector from which the keys and values of all heads are computed
(the latent), and one rotary (rope) part of the key, which all heads share.
"""

from dataclasses import dataclass

from .checks import check_positive


@dataclass(frozen=True, kw_only=True)
class MLADims:
    """The widths of a layer with multi-head latent attention (vLLM's name).

    Args:
        q_lora_rank: Optional. Width of the query's latent. If None, queries are not compressed.
        kv_lora_rank: width of the latent from which keys and values are computed.
        qk_nope_head_dim: width of the part of a head's query and key without position.
        qk_rope_head_dim: width of the rotary part of a head's query and of the shared key.
        v_head_dim: width of a head's value.

    Raises:
        ValueError: a width is below 1.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        check_positive(
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        if self.q_lora_rank is not None:
            check_positive(q_lora_rank=self.q_lora_rank)

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query: both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Elements per token in the cache, independent of the number of heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim
