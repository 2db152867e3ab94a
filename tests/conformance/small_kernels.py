"""Kernels of other signatures as candidates: a call of each, and options that they take."""

from typing import Any

import torch
from pagetwin.conformance.candidates.candidate import Candidate, Support
from pagetwin.contract.attention_options import DEFAULT_OPTIONS, AttentionOptions

OPTIONS = AttentionOptions(sliding_window=3)


CALL: dict[str, Any] = {
    "query": torch.zeros(3, 4, 8),
    "key_cache": torch.zeros(5, 16, 2, 8),
    "value_cache": torch.zeros(5, 16, 2, 8),
    "block_table": torch.zeros(1, 5, dtype=torch.int32),
    "query_start_loc": torch.tensor([0, 3], dtype=torch.int32),
    "seq_lens": torch.tensor([5], dtype=torch.int32),
    "max_query_len": 3,
    "max_seq_len": 5,
}


class Kernel:
    """Attention that notes its arguments, and raises an error if it has one."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def named(self, *args: Any, **given: Any) -> str:
        self.calls.append(given)
        if self.error is not None:
            raise self.error
        return "result"

    def few(
        self, query: Any, key_cache: Any, value_cache: Any, block_table: Any,
        query_start_loc: Any, seq_lens: Any, max_query_len: Any, max_seq_len: Any,
        scale: Any = 1,
    ) -> str:  # fmt: skip
        return self.named(scale=scale)

    def whole(self, *args: Any, options: Any = DEFAULT_OPTIONS, **given: Any) -> str:
        return self.named(*args, options=options, **given)


def candidate(attention: Any, support: Support | None = None) -> Candidate:
    return Candidate("own", {"paged_attention": attention}, support or Support())
