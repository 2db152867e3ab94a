"""AttentionOptions: the options of one attention call as one object."""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from .argument_types import typed
from .shapes import (
    CausalFlags,
    PerHead,
    PositionBias,
    Scale,
    TokenRanges,
    TreeMask,
)

BY_POSITION = {"by_position": True}
"""Declares an option that depends on the distance between a query and a key."""

PER_BATCH = {"per_batch": True}
"""Declares an option whose tensor has an entry per request or token of one batch."""


@typed
@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """The options of one attention call: masks, score functions, scales of codes.

    A new object has every option off, so a call names only the options that it uses. An operation
    that cannot take one of them raises and names it. Score functions are applied in the order of
    their fields. Tables and laws have the options in this order too.

    Args:
        causal: Whether a query attends only to keys up to its own position; [reqs] bool sets it
            per request. If None, the operation's own default: True in `paged_attention`, False in
            `encoder_attention`.
        sliding_window: Keys that a query attends to on each side, its own position included. If
            None, the window is unlimited.
        attention_chunk_size: Positions per chunk; a query attends only to keys in its own chunk.
            If None, the sequence is not divided.
        tree_mask: [reqs, tree, tree] bool. New token i of a request attends to new token j, and to
            all keys before the new ones. A token's position is one past that of its parent.
            Requests with more new tokens than `tree` are causal. If None, no tree mask is applied.
        query_ranges: [tokens, 2] int32, first and last position of a range of keys that the query
            attends to whatever the other masks say, such as the image it belongs to. (-1, -1), or
            a first past the last, means no range. If None, no query has one.
        logits_soft_cap: Cap c turns a scaled score s into c * tanh(s / c). It is above 0, and
            at most 1e30. If None, scores are not capped.
        alibi_slopes: [query_heads] float32. The score gets slope * (key position - query
            position) added, after the cap. If None, nothing is added.
        position_bias: [query_heads, 2 * reach + 1] float32, added to the score: entry reach + d
            for a key d positions after the query (d < 0: before it). Distances beyond the reach
            use the outermost entries. -inf gives a key no weight. If None, nothing is added.
        sinks: [query_heads] float32. One score per head that takes part in the softmax and has no
            value; -inf takes no weight. If None, no sink is added.
        k_scale: What the keys of a quantised cache are multiplied by. FP8: one number, or
            [kv_heads] float32. Formats with a scale per token and head (int8, int4, FP8):
            [num_blocks, block_size, kv_heads] float32. nvfp4: [num_blocks, block_size, kv_heads,
            head_size / 16] float8_e4m3fn. If None, the cache is not quantised.
        v_scale: The same for values.
        k_global_scale: What the block scales of keys are multiplied by, in a format that has them
            (nvfp4). If None, the format has none.
        v_global_scale: The same for values.
        out_scale: What the elements of an FP8 `out` will be multiplied by when they are read. If
            None, `out` is not quantised.
        batch_invariant: Whether a row's result is bitwise equal whatever else is in the batch,
            however its sequence is split into steps, and in whatever blocks it is stored. It
            costs time (docs/benchmark.md).

    Source:
        Sliding window: Beltagy et al., "Longformer", 2020. Soft cap: Gemma 2, 2024. ALiBi: Press
        et al., "Train Short, Test Long", ICLR 2022. Sinks: Xiao et al., "Efficient Streaming
        Language Models with Attention Sinks", ICLR 2024. Chunks: Llama 4, 2025. Trees: Miao et
        al., "SpecInfer", ASPLOS 2024. Position bias: Raffel et al., "T5", JMLR 2020.

    Example:
        >>> AttentionOptions(sliding_window=4096, logits_soft_cap=50.0).given
        ['sliding_window', 'logits_soft_cap']
    """

    causal: bool | CausalFlags | None = field(default=None, metadata=PER_BATCH)
    sliding_window: int | None = field(default=None, metadata=BY_POSITION)
    attention_chunk_size: int | None = field(default=None, metadata=BY_POSITION)
    tree_mask: TreeMask | None = field(default=None, metadata=PER_BATCH)
    query_ranges: TokenRanges | None = field(
        default=None, metadata=BY_POSITION | PER_BATCH
    )
    logits_soft_cap: float | None = None
    alibi_slopes: PerHead | None = field(default=None, metadata=BY_POSITION)
    position_bias: PositionBias | None = field(default=None, metadata=BY_POSITION)
    sinks: PerHead | None = None
    k_scale: Scale | float | None = None
    v_scale: Scale | float | None = None
    k_global_scale: float | None = None
    v_global_scale: float | None = None
    out_scale: Scale | float | None = None
    batch_invariant: bool = False

    def __eq__(self, other: object) -> bool:
        """Return whether all options are the same; a tensor is the same only as itself.

        So options that are equal have the same hash, and nothing is read from a device.
        """
        if not isinstance(other, AttentionOptions):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in OPTION_NAMES)
        return all(
            one is two
            if isinstance(one, Tensor) or isinstance(two, Tensor)
            else one == two
            for one, two in pairs
        )

    @cached_property
    def given(self) -> list[str]:
        """The names of the options that are not at their default, computed once per object."""
        return [
            option.name
            for option in fields(self)
            if getattr(self, option.name) is not option.default
        ]

    def with_causal(self, default: bool) -> "AttentionOptions":
        """Return the options with `causal` set: as given, or else the operation's default."""
        return replace(self, causal=default) if self.causal is None else self

    @property
    def k_scales(self) -> tuple[Tensor | float | None, float | None]:
        """The scale of the keys, and what multiplies it."""
        return self.k_scale, self.k_global_scale

    @property
    def v_scales(self) -> tuple[Tensor | float | None, float | None]:
        """The scale of the values, and what multiplies it."""
        return self.v_scale, self.v_global_scale

    @property
    def given_by_position(self) -> list[str]:
        """The given options that depend on the distance between a query and a key."""
        return [name for name in OPTIONS_BY_POSITION if getattr(self, name) is not None]

    @cached_property
    def numbers(self) -> tuple[Any, ...] | None:
        """Name and value of each given option in one tuple. None if a value is a tensor.

        The launch plan of a call depends on it. A layer passes the same options in every step, so
        it is computed once per object.
        """
        values = [(name, getattr(self, name)) for name in self.given]
        if any(isinstance(value, Tensor) for _, value in values):
            return None
        return tuple(part for pair in values for part in pair)


OPTION_NAMES = tuple(option.name for option in fields(AttentionOptions))
"""The names of all options."""

OPTIONS_BY_POSITION = tuple(
    option.name
    for option in fields(AttentionOptions)
    if "by_position" in option.metadata
)
"""The options that depend on the distance between a query and a key."""

OPTIONS_PER_BATCH = tuple(
    option.name for option in fields(AttentionOptions) if "per_batch" in option.metadata
)
"""The options whose tensors have an entry per request or token of one batch."""

DEFAULT_OPTIONS = AttentionOptions()
"""No option. Operations compare with it by identity, which makes the plain call cheap."""


def pack_options(**arguments: Any) -> dict[str, Any]:
    """Return keyword arguments with the options among them packed into `options`.

    Example:
        >>> sorted(pack_options(query=None, sliding_window=3))
        ['options', 'query']
    """
    own = {name: value for name, value in arguments.items() if name in OPTION_NAMES}
    rest = {name: value for name, value in arguments.items() if name not in own}
    if own:
        rest["options"] = replace(rest.get("options", DEFAULT_OPTIONS), **own)
    return rest


def unpack_options(options: AttentionOptions) -> dict[str, Any]:
    """Return the options that are not at their default as keyword arguments."""
    return {name: getattr(options, name) for name in options.given}
