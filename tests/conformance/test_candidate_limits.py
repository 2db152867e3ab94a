"""Why a call of a candidate is outside of its declared support."""

from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates.candidate import Support, why_outside
from pagetwin.contract.attention_options import AttentionOptions
from small_kernels import CALL, OPTIONS


@pytest.mark.parametrize(
    ("support", "changes", "why"),
    [
        (Support(options=[]), {}, None),
        (Support(options=[]), {"options": OPTIONS}, "option sliding_window"),
        (Support(options=[]), {"scale": 1.0}, "option scale"),
        (Support(options=[]), {"scale": None}, None),
        (Support(options=[]), {"options": AttentionOptions(causal=True)}, None),
        (
            Support(options=[]),
            {"options": AttentionOptions(causal=False)},
            "option causal",
        ),
        (
            Support(options=[]),
            {"value_cache": torch.zeros(5, 16, 2, 6)},
            "option value_head_size",
        ),
        (
            Support(options={"value_head_size": [6]}),
            {"value_cache": torch.zeros(5, 16, 2, 6)},
            None,
        ),
        (Support(query_lens=[3]), {}, None),
        (Support(query_lens=[2]), {}, "3 new tokens of a request"),
        (Support(query_lens=[3]), {"max_query_len": 4}, "4 new tokens of a request"),
        (Support(query_lens=[3, 5]), {"max_query_len": 4}, None),
        (Support(seq_lens=[5]), {}, None),
        (Support(seq_lens=[4]), {}, "5 keys of a request"),
        (Support(seq_lens=[5]), {"max_seq_len": 6}, "6 keys of a request"),
        (Support(seq_lens=[4]), {"seq_lens": torch.ones(1, device="meta")}, "5 keys"),
        (Support(seq_lens=[5]), {"seq_lens": torch.ones(1, device="meta")}, None),
        (Support(seq_lens=[5]), {"seq_lens": torch.ones(2, 1)}, None),
        (Support(head_sizes=[9]), {"query": torch.zeros(4)}, None),
        (Support(head_sizes=[9]), {"key_cache": torch.zeros(4)}, None),
    ],
)
def test_a_call_outside_says_the_first_reason(
    support: Support, changes: dict[str, Any], why: str | None
) -> None:
    found = why_outside("paged_attention", CALL | changes, support)
    assert found is None if why is None else str(found).startswith(why)


def test_calls_without_a_cache_are_compared_too() -> None:
    rows = torch.zeros(3, 4, 8)
    narrow = Support(head_sizes=[16])
    given = {"query": rows, "key": rows, "value": rows, "causal": False}
    assert why_outside("encoder_attention", given, narrow) == "head size 8"
    wide = given | {"value": torch.zeros(3, 4, 6)}
    found = why_outside("encoder_attention", wide, Support(options=[]))
    assert found == "option value_head_size"
    assert why_outside("encoder_attention", given, Support(options=[])) is None
    assert why_outside("reshape_and_cache", {"key": rows}, narrow) == "head size 8"
    merged = {"prefix_output": rows}
    assert why_outside("merge_attn_states", merged, narrow) == "head size 8"
    assert why_outside("blocks_needed", {}, narrow) is None


def test_latents_have_one_kv_head_and_queries_of_both_parts() -> None:
    given = {
        "q_nope": torch.zeros(3, 4, 8),
        "q_pe": torch.zeros(3, 4, 2),
        "kv_cache": torch.zeros(5, 16, 10),
    }
    operation = "latent_decode_attention"
    for support, why in (
        (Support(head_sizes=[8]), "head size 10"),
        (Support(group_sizes=[2]), "group size 4"),
        (Support(head_sizes=[10], group_sizes=[4], block_sizes=[16]), None),
    ):
        assert why_outside(operation, given, support) == why
