"""What may attention be asked for beyond its plain form?"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """One call's options, under the names of the arguments of `paged_attention`.

    Each defaults to what the plain form does, so that an operation names only those it has.
    """

    causal: bool | Tensor = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    tree_mask: Tensor | None = None
    query_ranges: Tensor | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: Tensor | None = None
    position_bias: Tensor | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None
    out_scale: Tensor | float | None = None
    batch_invariant: bool = False

    @property
    def counting_positions(self) -> list[str]:
        """The given options for which it matters where in the sequence a query stands."""
        names = (
            "sliding_window",
            "attention_chunk_size",
            "query_ranges",
            "alibi_slopes",
            "position_bias",
        )
        return [name for name in names if getattr(self, name) is not None]
