"""Latent caches that store records of bytes: writes, and what a gather returns."""

from typing import Any

import torch
from pagetwin.contract.latent_formats import LATENT_FORMATS, LatentFormat
from torch import Tensor

from golden.cases import adapter


def written_pages(
    twin: Any, inputs: dict[str, Any], form: LatentFormat, kv_c: Tensor, k_pe: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [num_blocks, bytes] pages after the write of a case, and their view as a cache."""
    size = inputs["block_size"]
    stride = inputs.get("block_stride_bytes", form.block_bytes(size))
    pages = torch.full(
        (inputs["num_blocks"], stride),
        inputs["fill_byte"],
        dtype=torch.uint8,
        device=kv_c.device,
    )
    kv_cache = form.view_cache(pages, size)
    slots = torch.as_tensor(inputs["slot_mapping"], dtype=torch.int64)
    twin.concat_and_cache_mla(kv_c, k_pe, kv_cache, slots.to(kv_c.device))
    return pages, kv_cache


def write(twin: Any, inputs: dict[str, Any], form: LatentFormat) -> dict[str, Any]:
    """Return the records of the slots that a case writes, and what all other bytes are."""
    pages, _ = written_pages(twin, inputs, form, inputs["kv_c"], inputs["k_pe"])
    records = pages.view(-1, form.record_bytes)
    slots = [slot for slot in inputs["slot_mapping"] if slot >= 0]
    rows = {str(slot): records[slot].tolist() for slot in slots}
    others = torch.ones(len(records), dtype=torch.bool, device=pages.device)
    others[slots] = False
    left = records[others].unique().tolist() or [inputs["fill_byte"]]
    return {"rows": rows, "all_other_bytes": left[0] if len(left) == 1 else left}


@adapter("v033_fp8_ds_mla_write", on_device=True)
def write_fp8(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return write(twin, inputs, LATENT_FORMATS["fp8_ds_mla"])


@adapter("v033_nvfp4_ds_mla_write", on_device=True)
def write_nvfp4(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    return write(twin, inputs, LATENT_FORMATS["nvfp4_ds_mla"])


@adapter("v033_fp8_ds_mla_v4_write_gather", on_device=True)
def write_and_gather_v4(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    form, size = LATENT_FORMATS["fp8_ds_mla_v4"], inputs["block_size"]
    kv_c, k_pe = inputs["k"].split([form.kv_lora_rank, form.qk_rope_head_dim], 1)
    pages, kv_cache = written_pages(twin, inputs, form, kv_c, k_pe)
    slots = [slot for slot in inputs["slot_mapping"] if slot >= 0]
    # one sequence with all slots of the cache
    num_blocks, rows = len(pages), len(pages) * size
    gathered = inputs["k"].new_empty(rows, form.width)
    twin.gather_latent_cache(
        kv_cache,
        gathered,
        torch.arange(num_blocks, dtype=torch.int32, device=pages.device)[None],
        torch.tensor([0, rows], dtype=torch.int32, device=pages.device),
    )
    data, scales = (part.cpu() for part in form.parts(kv_cache))
    tokens = {
        str(slot): {
            "data_576": data[divmod(slot, size)].tolist(),
            "scales_8": scales[divmod(slot, size)].tolist(),
        }
        for slot in slots
    }
    numbers = {str(slot): gathered[slot].cpu().float().tolist() for slot in slots}
    return {"tokens": tokens, "dequantized": numbers}
