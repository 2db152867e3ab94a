"""Errors and latency of an indexer's solution on a workload, whose output has no order.

Each timed call has weights of its own, drawn by the system, in the tensors of the call before it.
What it selected is judged after the last call, by scores in float64. A key whose score is as near
to the smallest selected one as FP8 products may be off may be selected or not.
"""

from collections.abc import Callable
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from ..checks.expect import Disagreement
from .definitions import Definition

ROUNDING = 2.0**-12
"""Share of the sum of absolute products that a sum of products of FP8 may be off: tensor cores keep
13 bits of each."""


def expect_selected(
    definition: Definition, inputs: dict[str, Any], found: Tensor, what: str
) -> None:
    """Raise a Disagreement if a row of slots is not the largest scores of its request.

    Args:
        definition: The definition of the indexer.
        inputs: Its inputs.
        found: [batch_size, topk] int32 slots.
        what: The call, in words.
    """
    names: dict[str, Any] = {}
    exec(definition.reference, names)
    score: Callable[..., Tensor] = names["score_keys"]
    absolute = inputs | {
        name: inputs[name].float().abs().to(inputs[name].dtype)
        for name in ("q_index_fp8", "weights")
    }
    # the sign is the first bit of a code, and all scales are positive
    absolute["k_index_cache_fp8"] = without_signs(definition, inputs)
    size, topk = definition.constants["page_size"], definition.constants["topk"]
    for req, keys in enumerate(inputs["seq_lens"].tolist()):
        exact = score(*inputs.values(), req)
        slack = float(score(*absolute.values(), req).max()) * ROUNDING if keys else 0.0
        pages = inputs["block_table"][req, : -(-keys // size)].tolist()
        at = {page: turn for turn, page in enumerate(pages)}
        slots = [slot for slot in found[req].tolist() if slot != -1]
        chosen = [
            at.get(slot // size, len(pages)) * size + slot % size for slot in slots
        ]
        count = min(topk, keys)
        where = f"row {req}"
        if len(set(chosen)) != count or len(chosen) != count:
            raise Disagreement(
                what, where, f"{len(set(chosen))} different slots", count
            )
        if any(not 0 <= key < keys for key in chosen):
            raise Disagreement(what, where, slots, "slots of the request")
        least = float(exact.topk(count).values[-1]) if count else 0.0
        missed = exact > least + slack
        missed[chosen] = False
        worst = float(exact[chosen].min()) if count else 0.0
        if bool(missed.any()) or worst < least - slack:
            largest = float(exact[missed].max()) if bool(missed.any()) else least
            raise Disagreement(what, where, f"a score of {worst:.6g}", f"{largest:.6g}")


def without_signs(definition: Definition, inputs: dict[str, Any]) -> Tensor:
    """Return the cache of an indexer with the absolute values of its codes."""
    sizes = definition.constants
    cache: Tensor = inputs["k_index_cache_fp8"].clone()
    codes = cache.view(torch.uint8).view(len(cache), -1)
    codes[:, : sizes["page_size"] * sizes["index_head_dim"]] &= 0x7F
    return cache


def draw_seed(pick: SystemRandom) -> dict[str, Tensor]:
    """Return the seed of the weights of a call, as the factors of other definitions."""
    return {"weights": torch.tensor([pick.getrandbits(62)], device="cpu")}


def draw_weights(inputs: dict[str, Any], seed: dict[str, Tensor]) -> dict[str, Any]:
    """Return inputs with weights that are drawn from a seed."""
    shape = inputs["weights"].shape
    generator = torch.Generator("cpu").manual_seed(int(seed["weights"]))
    drawn = torch.randn(shape, generator=generator, device="cpu") / 64
    return inputs | {"weights": drawn.to(inputs["weights"].device)}
