"""What does multi-head latent attention keep for each token?

Not the keys and values of every head, but one short vector from which all of them are computed
(the latent), and one key part that carries the position (rope) and that all heads share.
"""

from dataclasses import dataclass

from .checks import check_positive


@dataclass(frozen=True, kw_only=True)
class MLADims:
    """The widths of a layer with multi-head latent attention (vLLM's name).

    Args:
        q_lora_rank: width of the query's latent; None: queries are not compressed.
        kv_lora_rank: width of the latent that keys and values are computed from.
        qk_nope_head_dim: of one head's query and key, the part without position.
        qk_rope_head_dim: of one head's query, and of the shared key, the part with position.
        v_head_dim: of one head's value.

    Raises:
        ValueError: a width below 1.
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
        """Elements of one head's query: both parts."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_width(self) -> int:
        """Elements that the cache keeps for one token, whatever the number of heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim
