"""The rules about attention predict equal and deviating results on drawn inputs.

As in test_golden_rules.py, with the models of tests/golden/attention_semantics.py.
"""

import importlib
import pkgutil
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden.adapters
import golden.rules
from golden.attention_semantics import ATTENTION_MODELS
from golden.cases import (
    FOLDER,
    INTERPRETER_ONLY,
    Case,
    decode,
    differences,
    read_cases,
)
from golden.checking import check, copied
from golden.semantics import result_of

for package in (golden.adapters, golden.rules):
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")


@pytest.mark.parametrize("file", sorted(ATTENTION_MODELS))
def test_a_model_of_attention_returns_what_was_recorded(file: str) -> None:
    for case in read_cases(FOLDER, file):
        found = result_of(file, copied(case.inputs), ATTENTION_MODELS)
        assert ("raises" in found) == ("raises" in case.expected), case.name
        if "raises" in found:
            continue
        tolerance = found.pop("tolerance")
        expected = {name: case.expected[name] for name in found}
        wrong = list(differences(decode(found), expected, tolerance))
        assert not wrong, f"{file}/{case.name}: {wrong}"


# ---- inputs around each condition


class Drawn:
    """Lengths, block table and sizes of a batch, in any order, with padding and short rows.

    Args:
        pick: source of the choices.
        block_size: slots of a block.
        lens: numbers of new tokens to choose from.
    """

    def __init__(self, pick: Random, block_size: int, lens: list[int]) -> None:
        self.block_size, reqs = block_size, pick.randint(1, 3)
        self.new = [pick.choice(lens) for _ in range(reqs)]
        if pick.random() < 0.5:
            self.new.sort(key=lambda count: count > 1)
        contexts = [pick.choice([0, 0, 3, 11, 15, 16, 20]) for _ in self.new]
        self.keys = [one + other for one, other in zip(self.new, contexts, strict=True)]
        width = max(1, -(-max(self.keys) // block_size))
        self.blocks = reqs * width + 1
        ids = pick.sample(range(self.blocks), reqs * width)
        self.table = torch.tensor(ids, dtype=torch.int32).view(reqs, width)
        if width > 1 and pick.random() < 0.1:
            self.table = self.table[:, :-1].contiguous()
        self.kv_heads = pick.choice([1, 2])
        self.heads = self.kv_heads * pick.choice([1, 2])

    @property
    def starts(self) -> Tensor:
        return torch.tensor([0, *self.new]).cumsum(0).int()

    def slots(self) -> list[int]:
        """Return the slots of the new tokens, the last one of a row for those past its end."""
        found = []
        for req, (new, keys) in enumerate(zip(self.new, self.keys, strict=True)):
            for position in range(keys - new, keys):
                entry = min(position // self.block_size, self.table.shape[1] - 1)
                block = int(self.table[req, entry])
                found.append(block * self.block_size + position % self.block_size)
        return found

    def options(self, pick: Random) -> dict[str, Any]:
        """Return slopes and sinks, or None for each."""
        slopes = [0.5 / (head + 1) for head in range(self.heads)]
        sinks = [0.3 * head - 0.2 for head in range(self.heads)]
        return {
            "alibi_slopes": pick.choice([None, slopes]),
            "sinks": pick.choice([None, sinks]),
        }


def draw_unified(pick: Random) -> dict[str, Any]:
    """Return a batch whose maxima are right, too low or too high."""
    batch = Drawn(pick, 16, [0, 1, 1, 2, 5])
    if pick.random() < 0.1:
        batch.keys[0] = max(0, batch.new[0] - 1)
    room, longest = batch.table.shape[1] * 16, max(batch.keys)
    most = max(batch.new)
    cache = (batch.blocks, 16, batch.kv_heads, 8)
    return batch.options(pick) | {
        "q": torch.randn(sum(batch.new) + pick.choice([0, 0, 2]), batch.heads, 8),
        "k": torch.randn(cache),
        "v": torch.randn(cache),
        "cu_seqlens_q": batch.starts,
        "max_seqlen_q": pick.choice([most, most, most + 3, max(most - 1, 0)]),
        "seqused_k": torch.tensor(batch.keys, dtype=torch.int32),
        "max_seqlen_k": pick.choice([longest, longest, room, room + 1, longest - 1]),
        "softmax_scale": 0.3,
        "causal": pick.random() < 0.95,
        "window_size": pick.choice([[-1, -1], [-1, -1], [3, 0], [0, 0]]),
        "block_table": batch.table,
        "softcap": pick.choice([0, 0, 20.0, 2.0]),
    }


def draw_context(pick: Random) -> dict[str, Any]:
    """Return new tokens with a cached context, some in rows that are too short."""
    batch = Drawn(pick, 8, [1, 1, 2, 5])
    if pick.random() < 0.1:
        batch.keys[0] = batch.new[0] - 1
    tokens, shape = sum(batch.new), (batch.kv_heads, 8)
    return batch.options(pick) | {
        "q": torch.randn(tokens, batch.heads, 8),
        "k": torch.randn(tokens, *shape),
        "v": torch.randn(tokens, *shape),
        "kv_cache_dtype": "auto",
        "k_cache": torch.randn(batch.blocks, batch.kv_heads, 2, 8, 4),
        "v_cache": torch.randn(batch.blocks, *shape, 8),
        "b_loc": batch.table,
        "b_start_loc": batch.starts,
        "b_seq_len": torch.tensor(batch.keys, dtype=torch.int32),
        "max_seq_len": max(batch.keys),
        "max_input_len": max(batch.new),
        "sliding_window": pick.choice([None, 0, -1, 1, 4]),
        "sm_scale": pick.choice([None, 0.25]),
        "skip_decode": pick.random() < 0.4,
        "output_fill": -7.0,
    }


def draw_layer(pick: Random) -> dict[str, Any]:
    """Return a step in any order, whose maximum may lie, for a layer with or without options."""
    batch = Drawn(pick, 16, [0, 1, 1, 1, 2, 3])
    slots = batch.slots() + [-1] * pick.choice([0, 0, 2])
    starts, keys = batch.starts, torch.tensor(batch.keys, dtype=torch.int32)
    most, shape = max(batch.new), (len(slots), batch.kv_heads, 32)
    common = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "seq_lens": keys,
        "seq_lens_cpu": keys,
        "num_computed_tokens_cpu": keys - starts.diff(),
        "num_reqs": len(keys),
        "num_actual_tokens": sum(batch.new),
        "max_query_len": pick.choice([most, most, most, 1, most + 1]),
        "max_seq_len": max(batch.keys),
        "block_table_tensor": batch.table,
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }
    impl = {
        "num_heads": batch.heads,
        "head_size": 32,
        "scale": 0.17677669,
        "num_kv_heads": batch.kv_heads,
        "alibi_slopes": None,
        "sliding_window": pick.choice([None, None, 4]),
        "kv_cache_dtype": "auto",
        "logits_soft_cap": pick.choice([None, None, 2.0]),
    }
    return {
        "impl": impl,
        "query": torch.randn(len(slots), batch.heads, 32),
        "key": torch.randn(shape),
        "value": torch.randn(shape),
        "kv_cache": torch.randn(2, batch.blocks, 16, batch.kv_heads, 32),
        "common_attn_metadata": common,
        "attn_metadata_is_none": pick.random() < 0.1,
        "output_given": pick.random() < 0.9,
        "output_scale": pick.choice([None] * 9 + [1.0]),
        "output_block_scale": None,
    }


DRAWN = {
    "context_attention_fwd_v0_paged": draw_context,
    "unified_attention_paged": draw_unified,
    "xformers_impl_forward": draw_layer,
}


def test_every_model_of_attention_has_drawn_inputs() -> None:
    assert DRAWN.keys() == ATTENTION_MODELS.keys()


@pytest.mark.extended
@pytest.mark.parametrize("file", sorted(DRAWN))
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_the_rules_predict_where_attention_deviates(file: str, seed: int) -> None:
    torch.manual_seed(seed)
    inputs = DRAWN[file](Random(seed))
    expected = result_of(file, copied(inputs), ATTENTION_MODELS)
    case = Case(file, f"seed {seed}", inputs, expected, {})
    check(case, "reference", "")
    if not (file in INTERPRETER_ONLY and torch.cuda.is_available()):
        check(case, "optimized", "")
