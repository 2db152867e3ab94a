"""Laws of memory past the end of a tensor, or of a row of a block table: it is not even read.

A kernel that reads past the end of a tensor usually reads other memory of its process, and masks it
later. So here every tensor ends at a guard page. On a CPU and on a CUDA device a read past the end
then ends the process, in interpreted kernels too.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..candidates.calls.calling import expect_right, run_call
from ..candidates.candidate import OutsideSupport
from ..candidates.guard.guard_pages import guarded, guarded_rows
from ..candidates.setting import Setting
from ..cases.batches import BatchPlan
from ..cases.latent_batches import LatentPlan, build_latents
from ..cases.options import (
    Call,
    paged_call,
    quantised_call,
    ragged_call,
    slopes,
    tree_of,
)
from ..checks.canaries import packed
from ..checks.expect import expect_same
from .latents import WAYS, arguments_of, expect_latents, run_latents
from .law import law
from .slots import SlotStep, tensors_of


def all_guarded(setting: Setting, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name, every tensor among them guarded that may not be read past."""
    allowed = setting.candidate.support.reads_past
    return {
        name: guarded(argument)
        if isinstance(argument, Tensor) and name not in allowed
        else argument
        for name, argument in arguments.items()
    }


def with_guarded_rows(setting: Setting, table: Tensor, used: int) -> Tensor:
    """Return a block table of which no entry past the first ones of a row may be read.

    Raises:
        OutsideSupport: The candidate declares that it reads such entries.
    """
    if "block_table" in setting.candidate.support.reads_past:
        raise OutsideSupport("block_table that must not be read past the sequences")
    return guarded_rows(table, used)


KINDS = ("decode", "prefill", "window", "tree", "not causal", "fp8", "invariant")
MANY_REQS = {"cpu": 70, "cuda": 1100}
"""Requests that a kernel does not find in one pass over all of them."""


def tight_call(
    kind: str, setting: Setting, lens: tuple[int, ...] = (9, 37), spare: int = 0
) -> Call:
    """Return a call whose last request fills its row of the block table, but no KV tile.

    Args:
        kind: The options and the new tokens: one of KINDS, or "many decodes".
        setting: The candidate's declared support, to which the sizes are fitted.
        lens: Keys of the requests: two, except for many decodes.
        spare: Columns of the block table that no request uses.
    """
    news = {"prefill": (1, 20), "tree": (1, 3)}.get(kind, (1,) * len(lens))
    plan = BatchPlan(
        news, lens, kv_heads=1, head_size=8, spare_blocks=spare, fused=False
    )
    plan, device = setting.fit(plan), setting.device
    heads = plan.kv_heads * plan.group
    options: dict[str, dict[str, Any]] = {
        "window": {"sliding_window": 20, "sinks": slopes(heads)},
        "tree": {"tree_mask": tree_of([None, 0, 0]).repeat(2, 1, 1)},
        "not causal": {"causal": torch.tensor([True, False])},
        "invariant": {"batch_invariant": True},
        "decode": {"alibi_slopes": slopes(heads)},
    }
    call = paged_call(plan, device, **options.get(kind, {}))
    if kind == "fp8":
        return quantised_call(call, torch.float8_e4m3fn, slopes(1, 0.1), slopes(1))
    return call


@law("paged_attention", cases=(*KINDS, "many decodes"))
def nothing_past_the_end_of_a_tensor_is_read(setting: Setting, kind: str) -> None:
    lens: tuple[int, ...] = (9, 37)
    if kind == "many decodes":
        lens = (9,) * (MANY_REQS.get(setting.device.type, 1100) - 1) + (37,)
    call = tight_call(kind, setting, lens)
    close = replace(call, arguments=all_guarded(setting, call.arguments))
    expect_right(setting, call, run_call(setting, close, is_guarded=True))


@law("paged_attention", cases=KINDS)
def block_table_entries_past_the_end_of_a_sequence_are_never_read(
    setting: Setting, kind: str
) -> None:
    """Both sequences have as many blocks, and the table has three more columns."""
    call = tight_call(kind, setting, (37, 37), spare=3)
    table = with_guarded_rows(setting, call.arguments["block_table"], len(call.rows[0]))
    close = replace(call, arguments=call.arguments | {"block_table": table})
    expect_right(setting, call, run_call(setting, close, is_guarded=True))


@law("encoder_attention", cases=["decode", "prefill", "not causal"])
def nothing_past_the_end_of_a_ragged_tensor_is_read(
    setting: Setting, kind: str
) -> None:
    call = ragged_call(tight_call(kind, setting))
    close = replace(call, arguments=all_guarded(setting, call.arguments))
    expect_right(setting, call, run_call(setting, close, is_guarded=True))


@law(*WAYS, cases=WAYS)
def nothing_past_the_end_of_a_tensor_of_latents_is_read(
    setting: Setting, way: str
) -> None:
    plan = LatentPlan((1, 3), (9, 37), heads=1)
    batch = build_latents(plan, setting.device)
    batch = replace(batch, block_table=batch.block_table[:, :3].contiguous())
    given = all_guarded(setting, arguments_of(batch, way))
    expect_latents(setting, batch, way, run_latents(setting, batch, way, **given))


@law("gather_cache", "reshape_and_cache", cases=[(3, 5), (1, 7), (16, 3)])
def nothing_past_the_end_of_a_tensor_is_gathered_or_written(
    setting: Setting, case: tuple[int, int]
) -> None:
    """The tokens fill no tile, and the elements of a token are not a power of two."""
    block_size, tokens = case
    blocks = -(-tokens // block_size)
    generator = torch.Generator().manual_seed(tokens)
    caches = torch.zeros(2, blocks, block_size, 3, 5).to(setting.device)
    new = torch.randn(2, tokens, 3, 5, generator=generator).to(setting.device)
    given = all_guarded(
        setting,
        {
            "key": new[0],
            "value": new[1],
            "key_cache": caches[0],
            "value_cache": caches[1],
            "slot_mapping": torch.arange(tokens, device=setting.device),
            "block_table": torch.arange(blocks, device=setting.device).int()[None],
            "seq_start_loc": torch.tensor([0, tokens], device=setting.device).int(),
        },
    )
    read = ("key_cache", "value_cache", "block_table", "seq_start_loc")
    written = {name: value for name, value in given.items() if name not in read[2:]}
    setting.candidate.reshape_and_cache(**written)
    found = setting.candidate.gather_cache(
        **{name: given[name] for name in read}, num_tokens=tokens
    )
    for half, what in enumerate(("keys", "values")):
        expect_same(what, packed(found[half]), packed(new[half]))


@law("compute_slot_mapping_device", cases=[(1, 2), (3, 6), (9, 0)])
def nothing_past_the_end_of_a_block_table_is_read_for_slots(
    setting: Setting, case: tuple[int, int]
) -> None:
    new, computed = case
    row = tuple(range(3, 4 + (new + computed - 1) // 4))
    step = SlotStep((0, new), (0, computed), ((), row), 4)
    given = tensors_of(step, setting.device)
    table = given["block_table"][:, : len(row)]
    given = all_guarded(setting, given | {"block_table": table})
    found = setting.candidate.compute_slot_mapping_device(
        **given, block_size=4, num_tokens=new + 2
    )
    right = torch.tensor([*step.slots(), -1, -1], dtype=torch.int64)
    expect_same("slots", packed(found), right)
