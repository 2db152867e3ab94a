"""Laws of memory past the end of a tensor: it is not even read.

A kernel that reads past the end of a tensor usually reads other memory of its process, and masks it
later. So here every tensor ends at a page that must not be accessed. On a CPU a read past the end
then ends the process, in interpreted kernels too. On other devices these are ordinary calls.
"""

import ctypes
import math
import mmap
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..generators.batches import BatchPlan
from ..generators.latent_batches import LatentPlan, build_latents
from ..generators.options import (
    Call,
    paged_call,
    quantised_call,
    ragged_call,
    slopes,
    tree_of,
)
from ..harness.calling import expect_right, run_call
from ..harness.canaries import packed
from ..harness.expect import expect_same
from ..harness.law import Setting, law
from .latents import WAYS, arguments_of, expect_latents, run_latents
from .slots import SlotStep, tensors_of

PAGE = mmap.PAGESIZE


def guarded(tensor: Tensor) -> Tensor:
    """Return a contiguous copy after whose last byte comes a page that must not be accessed.

    A load or store there is a segmentation fault, which ends the process.

    Args:
        tensor: Any tensor. One on another device than the CPU is returned as it is.

    Raises:
        OSError: The system does not protect the page.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    num_bytes = tensor.numel() * tensor.element_size()
    pages = math.ceil(num_bytes / PAGE)
    memory = torch.frombuffer(mmap.mmap(-1, (pages + 1) * PAGE), dtype=torch.uint8)
    end = pages * PAGE
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    address = ctypes.c_void_p(memory.data_ptr() + end)
    if protect(address, ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect did not protect a page")
    copy = memory[end - num_bytes : end].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def all_guarded(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name, every tensor among them guarded."""
    return {
        name: guarded(each) if isinstance(each, Tensor) else each
        for name, each in arguments.items()
    }


KINDS = ("decode", "prefill", "window", "tree", "not causal", "fp8", "invariant")


def tight_call(kind: str, device: torch.device) -> Call:
    """Return a call whose last request fills its row of the block table, but no KV tile."""
    news = {"prefill": (1, 20), "tree": (1, 3)}.get(kind, (1, 1))
    plan = BatchPlan(
        news, (9, 37), kv_heads=1, head_size=8, spare_blocks=0, fused=False
    )
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


@law("paged_attention", cases=KINDS)
def nothing_past_the_end_of_a_tensor_is_read(setting: Setting, kind: str) -> None:
    call = tight_call(kind, setting.device)
    call = replace(call, arguments=all_guarded(call.arguments))
    expect_right(setting, call, run_call(setting, call))


@law("encoder_attention", cases=["decode", "prefill", "not causal"])
def nothing_past_the_end_of_a_ragged_tensor_is_read(
    setting: Setting, kind: str
) -> None:
    call = ragged_call(tight_call(kind, setting.device))
    call = replace(call, arguments=all_guarded(call.arguments))
    expect_right(setting, call, run_call(setting, call))


@law(*WAYS, cases=WAYS)
def nothing_past_the_end_of_a_tensor_of_latents_is_read(
    setting: Setting, way: str
) -> None:
    plan = LatentPlan((1, 3), (9, 37), heads=1)
    batch = build_latents(plan, setting.device)
    batch = replace(batch, block_table=batch.block_table[:, :3].contiguous())
    given = all_guarded(arguments_of(batch, way))
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
        {
            "key": new[0],
            "value": new[1],
            "key_cache": caches[0],
            "value_cache": caches[1],
            "slot_mapping": torch.arange(tokens, device=setting.device),
            "block_table": torch.arange(blocks, device=setting.device).int()[None],
            "seq_start_loc": torch.tensor([0, tokens], device=setting.device).int(),
        }
    )
    read = ("key_cache", "value_cache", "block_table", "seq_start_loc")
    written = {name: each for name, each in given.items() if name not in read[2:]}
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
    given = all_guarded(given | {"block_table": table})
    found = setting.candidate.compute_slot_mapping_device(
        **given, block_size=4, num_tokens=new + 2
    )
    right = torch.tensor([*step.slots(), -1, -1], dtype=torch.int64)
    expect_same("slots", packed(found), right)
