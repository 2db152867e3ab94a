"""The calling convention of flash-attn as operations: any module with its functions is checked.

An adapter is a few lines:

    import my_flash_attn
    from pagetwin.conformance import FlashAttnFunctions

    FUNCTIONS = FlashAttnFunctions(my_flash_attn)
    SUPPORT = FUNCTIONS.support(block_sizes=[64])
    paged_attention = FUNCTIONS.paged_attention
    encoder_attention = FUNCTIONS.encoder_attention
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from .families import OPTIONS, flash_attention_like
from .support import Support


class FlashAttnFunctions:
    """The functions of a module with flash-attn's names, as operations of the suite.

    Batches whose requests have equally many new tokens go to `flash_attn_with_kvcache`, or to
    `flash_attn_func` if their keys do too. The others go to `flash_attn_varlen_func`. Arguments are
    given by name, by those names that the signatures have. The second and the third version differ
    in them.

    Args:
        module: It has `flash_attn_varlen_func`, and may have `flash_attn_with_kvcache` and
            `flash_attn_func`.
        reads_past: Whether it reads entries of a block table after those that a request needs.
            These are then 0, and the support says so.

    Raises:
        AttributeError: The module has no `flash_attn_varlen_func`.
    """

    def __init__(self, module: Any, reads_past: bool = True) -> None:
        """Read the names of the arguments."""
        self.varlen = module.flash_attn_varlen_func
        self.kvcache = getattr(module, "flash_attn_with_kvcache", None)
        self.dense = getattr(module, "flash_attn_func", None)
        self.reads_past = reads_past
        self.takes = {
            function: set(inspect.signature(function).parameters)
            for function in (self.varlen, self.kvcache, self.dense)
            if function is not None
        }

    def support(self, **changes: Any) -> Support:
        """Return what the functions take, as far as their arguments tell.

        ALiBi is for causal calls, so it is declared where `operations` are `paged_attention` alone.

        Args:
            changes: Fields of `Support` with other values.
        """
        taken = self.takes[self.varlen]
        options: dict[str, Any] = dict(OPTIONS)
        if "s_aux" in taken:
            options["sinks"] = None
        operations = ["paged_attention", "encoder_attention"]
        given: dict[str, Any] = {"operations": operations, "options": options}
        if "alibi_slopes" in taken and changes.get("operations") == operations[:1]:
            options["alibi_slopes"] = None
            # without a causal mask their bias falls to both sides, -|distance|
            given["never_together"] = [("causal", "alibi_slopes")]
        if self.reads_past:
            given["reads_past"] = ["block_table"]
        return flash_attention_like(**(given | changes))

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention of each new token over its sequence in the paged cache."""
        if self.reads_past:
            columns = torch.arange(block_table.shape[1], device=query.device)
            owned = columns < -(-seq_lens // key_cache.shape[1])[:, None]
            block_table = torch.where(owned, block_table, 0)
        given = _given(
            scale, causal, sliding_window, logits_soft_cap, alibi_slopes, sinks
        )
        tokens, batch = int(query_start_loc[-1]), len(seq_lens)
        if self.kvcache is not None and _is_uniform(query_start_loc):
            return self._call(
                self.kvcache,
                query,
                tokens,
                out,
                lse,
                given | {"cache_seqlens": seq_lens, "table": block_table},
                (key_cache, value_cache),
                batch,
            )
        starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
        given |= {
            "cu_seqlens_q": query_start_loc,
            "max_seqlen_q": max_query_len,
            "max_seqlen_k": max_seq_len,
            "table": block_table,
            "cu_seqlens_k": starts,
        }
        caches = (key_cache, value_cache)
        return self._call(self.varlen, query, tokens, out, lse, given, caches)

    def encoder_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        max_query_len: int,
        max_key_len: int,
        scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        causal: bool = False,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return attention of each request's queries over its keys."""
        given = _given(
            scale, causal, sliding_window, logits_soft_cap, alibi_slopes, sinks
        )
        tokens, keys = int(query_start_loc[-1]), int(key_start_loc[-1])
        batch = len(query_start_loc) - 1
        uniform = _is_uniform(query_start_loc) and _is_uniform(key_start_loc)
        if self.dense is not None and uniform:
            held = [
                part[:keys].view(batch, -1, *part.shape[1:]) for part in (key, value)
            ]
            return self._call(self.dense, query, tokens, out, lse, given, held, batch)
        given |= {
            "cu_seqlens_q": query_start_loc,
            "cu_seqlens_k": key_start_loc,
            "max_seqlen_q": max_query_len,
            "max_seqlen_k": max_key_len,
        }
        parts = (key[:keys], value[:keys])
        return self._call(self.varlen, query, tokens, out, lse, given, parts)

    def _call(
        self,
        function: Any,
        query: Tensor,
        tokens: int,
        out: Tensor | None,
        lse: Tensor | None,
        given: dict[str, Any],
        held: Any,
        batch: int | None = None,
    ) -> Tensor:
        """Return the output of a function, copied to `out` and `lse`.

        Args:
            tokens: Rows of requests. Rows after them are 0.
            given: Arguments by name; `table` is a block table.
            held: Keys and values.
            batch: The requests of a dense batch, or None if it is packed.
        """
        sinks = given.get("s_aux")
        if out is None:
            out = query.new_empty(*query.shape[:2], held[1].shape[-1])
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        if not tokens:
            return out
        taken = self.takes[function]
        if "table" in given:
            name = "page_table" if "page_table" in taken else "block_table"
            given[name] = given.pop("table")
        asks = (
            "return_softmax_lse"
            if "return_softmax_lse" in taken
            else "return_attn_probs"
        )
        rows = query[:tokens]
        if batch is not None:
            rows = rows.view(batch, -1, *rows.shape[1:])
        found, natural, *_ = function(rows, *held, **given, **{asks: True})
        if batch is not None:
            found = found.flatten(0, 1)
            natural = natural.transpose(0, 1).flatten(1)
        out[:tokens] = found
        if lse is not None:
            # without keys it may be +inf
            empty = -torch.inf if sinks is None else sinks.float()[:, None]
            lse[:, :tokens] = torch.where(natural.isinf(), empty, natural)
        return out


def _given(
    scale: float | None,
    causal: bool,
    window: int | None,
    cap: float | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    """Return the arguments that each function has, without those that are not asked for."""
    left = -1 if window is None else window - 1
    given: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": (left, 0 if causal and left >= 0 else left),
        "softcap": cap or 0.0,
    }
    if slopes is not None:
        given["alibi_slopes"] = slopes
    if sinks is not None:
        given["s_aux"] = sinks
    return given


def _is_uniform(starts: Tensor) -> bool:
    """Return whether all requests have equally many tokens, and at least one."""
    lengths = starts.diff()
    return (
        bool(len(lengths))
        and bool(lengths[0] > 0)
        and bool((lengths == lengths[0]).all())
    )
