"""Workloads: inputs of a definition with needles, poison and lengths on both sides of edges.

A workload is a plan of the laws with the sizes of the definition. Its tensors are written to a
safetensors file. NaN is in every slot that no request uses, and in the rest of each last page.
Every request has keys, because FlashInfer-Bench counts -inf in a result as an error. It counts NaN
too, so caches that are written have finite numbers in every slot.
"""

import json
import uuid
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from ..cases.batches import BatchPlan, build
from ..cases.caches import CacheSizes
from ..cases.latent_batches import LatentPlan, build_latents
from ..laws.cache_write import CacheWrite
from ..laws.merging import Parts
from ..laws.sparse_attention import SparsePlan, build_sparse
from .definitions import DTYPE, Definition
from .inputs.appends import append_inputs
from .inputs.calls import latent_inputs, map_heads, paged_inputs
from .inputs.indexer import random_inputs
from .inputs.selections import place_latents, sparse_inputs

Plan = BatchPlan | LatentPlan | Parts | CacheWrite | SparsePlan | tuple[int, int, int]
"""A tuple has the requests, the most keys and the selected keys of an indexer."""
RAGGED_BLOCK = 16
"""Block size of the plans of definitions without pages."""
NOPE = 32
"""Elements of the part without position of a head's key, before it is projected to a latent."""
LONG = 700
"""Keys of the longest request."""
ST_DTYPES = {
    torch.bfloat16: "BF16", torch.float32: "F32", torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8",
}  # fmt: skip
"""Names of dtypes in safetensors files."""


@dataclass(frozen=True)
class TraceWorkload:
    """Inputs of a definition.

    Args:
        definition: The definition.
        title: What is special about it.
        plan: The plan from which its tensors are built.
    """

    definition: Definition
    title: str
    plan: Plan

    @property
    def uuid(self) -> str:
        """An identifier that depends on the definition and the plan alone."""
        return str(
            uuid.uuid5(uuid.NAMESPACE_URL, f"{self.definition.name} {self.plan}")
        )

    @property
    def blob(self) -> str:
        """The path of its tensors, relative to the root of the dataset."""
        family = self.definition.family.op_type
        return f"blob/workloads/{family}/{self.definition.name}/{self.uuid}.safetensors"

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Return the inputs in the definition's order."""
        return inputs_of(self.definition, self.plan, device)

    def to_json(self) -> dict[str, Any]:
        """Return the workload in the schema of flashinfer-trace, without its tensors."""
        inputs = self.inputs(torch.device("cpu"))
        axes: dict[str, int] = {}
        described: dict[str, Any] = {}
        for name, shape in self.definition.inputs.items():
            if shape is None:
                described[name] = {"type": "scalar", "value": inputs[name]}
                continue
            axes |= dict(zip(shape, inputs[name].shape, strict=True))
            described[name] = {
                "type": "safetensors",
                "path": self.blob,
                "tensor_key": name,
            }
        constants = self.definition.constants
        variable = {axis: n for axis, n in axes.items() if axis not in constants}
        return {"uuid": self.uuid, "axes": variable, "inputs": described}


def inputs_of(
    definition: Definition, plan: Plan, device: torch.device
) -> dict[str, Any]:
    """Return the inputs of a plan that has the sizes of the definition."""
    sizes = definition.constants
    if isinstance(plan, tuple):
        return random_inputs(definition, plan[0], plan[1], device)
    if isinstance(plan, Parts):
        values, sums = plan.draw(device)
        columns = [lse.T.contiguous() for lse in sums]
        if plan.with_prefix is not None:
            # a set without keys: its attention must not be read
            values[0][plan.with_prefix :] = torch.nan
            columns[0][plan.with_prefix :] = -torch.inf
        states = (values[0], columns[0], values[1], columns[1])
        return dict(zip(definition.inputs, states, strict=True))
    if isinstance(plan, SparsePlan):
        call = build_sparse(plan, device)
        caches = call.key_cache[:, :, 0], call.value_cache[:, :, 0]
        latents = place_latents(definition, call.query, caches, plan.seed)
        heads_of_all = list(range(sizes["num_qo_heads"]))
        scale = plan.head_size**-0.5
        return sparse_inputs(definition, latents, call.slots, heads_of_all, scale)
    if isinstance(plan, CacheWrite):
        new = plan.tokens(device, plan.sizes.dtype)
        caches = plan.sizes.caches(device, plan.seed)
        written = list(plan.slots)
        return append_inputs(definition, (new[0], new[1]), caches, written, plan.seed)
    if isinstance(plan, LatentPlan):
        given = build_latents(plan, device).decode_arguments()
        every = list(range(sizes["num_qo_heads"]))
        widths = list(range(plan.rank)), list(range(plan.rope))
        return latent_inputs(definition, given, every, widths)
    given = build(plan, device).arguments()
    heads = map_heads(range(plan.kv_heads), plan.group, plan.kv_heads, seed=0)
    return paged_inputs(definition, given, heads)


def merge_workloads(definition: Definition) -> list[TraceWorkload]:
    """Return the workloads of a merge of states.

    No row has two empty sets: FlashInfer-Bench counts -inf in a result as an error.
    """
    sizes, dtype = definition.constants, getattr(torch, DTYPE)
    chosen: dict[str, tuple[int, float, float, int | None]] = {
        # queries, spread and mean of the log-sum-exps, queries with keys in both sets
        "one query": (1, 0.5, 0.0, None),
        "equal weights": (17, 0.0, 7.0, None),
        "one set outweighs the other": (65, 60.0, 0.0, None),
        "large log-sum-exps": (64, 5.0, 3e4, None),
        "very small log-sum-exps": (63, 5.0, -9e4, None),
        "the first set is empty for some queries": (129, 0.5, 0.0, 40),
        "the first set is always empty": (8, 0.5, 0.0, 0),
    }
    return [
        TraceWorkload(
            definition,
            title,
            Parts(
                parts=2, tokens=tokens, heads=sizes["num_heads"], size=sizes["head_dim"],
                dtype=dtype, views=("packed", "packed"), spread=spread, level=level,
                empty=0.0, mark=-torch.inf, base_2=True, with_prefix=with_prefix, seed=seed,
            ),
        )
        for seed, (title, (tokens, spread, level, with_prefix)) in enumerate(
            chosen.items()
        )
    ]  # fmt: skip


def append_workloads(definition: Definition) -> list[TraceWorkload]:
    """Return the workloads of a cache append. Every slot has finite numbers before.

    A slot that is written by mistake, or not written, differs from the expected one.
    """
    sizes, pick = definition.constants, Random(0)
    size = sizes["page_size"]
    many = max(8, -(-LONG // size))
    chosen: dict[str, tuple[int, list[int]]] = {
        # pages of the cache, slots
        "one token in the first slot": (2, [0]),
        "the last slot of the cache": (3, [3 * size - 1]),
        "both sides of page edges": (
            4,
            sorted({0, size - 1, size, 2 * size - 1, 2 * size, 4 * size - 1}),
        ),
        "whole pages": (4, [*range(size, 3 * size)]),
        "a token per page": (
            many,
            [page * size + pick.randrange(size) for page in range(many)],
        ),
        "scattered slots": (many, pick.sample(range(many * size), many * size // 3)),
        "every slot, in any order": (8, pick.sample(range(8 * size), 8 * size)),
    }
    return [
        TraceWorkload(
            definition,
            title,
            CacheWrite(
                tuple(slots), 0,
                CacheSizes(
                    pages, size, sizes["num_kv_heads"], sizes["head_dim"],
                    sizes["head_dim"], getattr(torch, DTYPE),
                ),
                ("packed", "packed"), 1, seed,
            ),
        )
        for seed, (title, (pages, slots)) in enumerate(chosen.items())
    ]  # fmt: skip


def sparse_workloads(definition: Definition) -> list[TraceWorkload]:
    """Return the workloads of attention over selected slots. Every query has a slot."""
    sizes = definition.constants
    size, topk = sizes["page_size"], sizes["topk"]
    chosen: dict[str, tuple[list[int], int, bool]] = {
        # slots of each query, slots of the cache at least, whether a slot is named twice
        "one slot": ([1], 9, False),
        "tile edges, needle there": ([63, 64, 65, 127, 128, 129], 300, False),
        "all slots of the cache": ([4 * size], 4 * size, False),
        "as many slots as there may be": ([topk, 1, topk - 1], topk + 9, False),
        "a slot twice": ([5, 33, 130], 200, True),
        "many queries": ([1 + 7 * n % 97 for n in range(64)], 900, False),
    }
    found = []
    for seed, (title, (lens, least, repeats)) in enumerate(chosen.items()):
        most = topk - repeats
        own = tuple(max(1, min(count, most)) for count in lens)
        plan = SparsePlan(
            own, spare=topk - max(own) - repeats, num_blocks=-(-least // size),
            block_size=size, kv_heads=1, group=sizes["num_qo_heads"],
            head_size=sizes["head_dim_ckv"] + sizes["head_dim_kpe"],
            value_size=sizes["head_dim_ckv"], dtype=getattr(torch, DTYPE),
            repeats=repeats, seed=seed,
        )  # fmt: skip
        found.append(TraceWorkload(definition, title, plan))
    return found


def index_workloads(definition: Definition) -> list[TraceWorkload]:
    """Return the workloads of an indexer: fewer keys than it selects, as many, and more."""
    size, topk = definition.constants["page_size"], definition.constants["topk"]
    chosen: dict[str, tuple[int, int]] = {
        # requests, most keys
        "one key": (1, 1),
        "fewer keys than are selected": (5, topk - 1),
        "as many keys as are selected": (2, topk),
        "a key more than is selected": (3, topk + 1),
        "a page edge": (4, size * (topk // size + 2)),
        "many requests": (33, topk + 300),
    }
    return [
        TraceWorkload(definition, title, (tokens, keys, min(topk, 64)))
        for title, (tokens, keys) in chosen.items()
    ]


def workloads_of(definition: Definition) -> list[TraceWorkload]:
    """Return the workloads of a definition."""
    if definition.family.operation == "select_keys":
        return index_workloads(definition)
    if definition.family.operation == "sparse_attention":
        return sparse_workloads(definition)
    if definition.family.operation == "reshape_and_cache":
        return append_workloads(definition)
    if definition.family.operation == "merge_attn_states":
        return merge_workloads(definition)
    size = definition.constants.get("page_size", RAGGED_BLOCK)
    edges = sorted({max(1, size - 1), size, size + 1, 2 * size, 2 * size + 1})
    tiles = [63, 64, 65, 127, 128, 129]
    decodes: dict[str, tuple[list[tuple[int, int]], str, str]] = {
        "one key": ([(1, 1)], "none", "scattered"),
        "page edges, needle last": ([(1, n) for n in edges], "last", "scattered"),
        "tile edges, needle there": ([(1, n) for n in tiles], "tile edge", "scattered"),
        "shared pages": ([(1, n) for n in (200, 33, 130)], "first", "shared prefix"),
        "a page twice": ([(1, 3 * size), (1, 2 * size)], "none", "repeated block"),
        "a long request": (
            [(1, 1), (1, LONG), (1, 2)],
            "block edge",
            "scattered",
        ),
        "many requests": (
            [(1, 1 + 7 * n % 97) for n in range(64)],
            "none",
            "scattered",
        ),
    }
    prefills = {
        "one key": ([(1, 1)], "none", "scattered"),
        "whole prompts at page edges": ([(n, n) for n in edges], "last", "scattered"),
        "whole prompts at tile edges": (
            [(n, n) for n in tiles],
            "tile edge",
            "scattered",
        ),
        "chunks of prompts": (
            [(16, 48), (17, 65), (1, 65), (64, 129)],
            "first new",
            "scattered",
        ),
        "shared pages": ([(5, 200), (33, 33), (2, 130)], "first", "shared prefix"),
        "a long request beside decodes": (
            [(1, 1), (130, LONG), (1, 2)],
            "block edge",
            "scattered",
        ),
    }
    chosen = decodes if definition.family.is_decode else prefills
    return [
        TraceWorkload(
            definition, title, _plan(definition, size, lens, needle, table, seed)
        )
        for seed, (title, (lens, needle, table)) in enumerate(chosen.items())
    ]


def _plan(
    definition: Definition,
    size: int,
    lens: list[tuple[int, int]],
    needle: str,
    table: str,
    seed: int,
) -> Plan:
    sizes = definition.constants
    queries, keys = tuple(new for new, _ in lens), tuple(key for _, key in lens)
    dtype = getattr(torch, DTYPE)
    heads = sizes["num_qo_heads"]
    if "head_dim" not in sizes:
        return LatentPlan(
            queries, keys, block_size=size, heads=heads, rank=sizes["head_dim_ckv"],
            rope=sizes["head_dim_kpe"], nope=NOPE, value=NOPE, dtype=dtype,
            table=table, needle=needle, seed=seed,
        )  # fmt: skip
    return BatchPlan(
        queries, keys, block_size=size, kv_heads=sizes["num_kv_heads"],
        group=heads // sizes["num_kv_heads"], head_size=sizes["head_dim"],
        dtype=dtype, table=table, needle=needle, fused=False, seed=seed,
    )  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a safetensors file.

    Source:
        https://huggingface.co/docs/safetensors, section "Format".
    """
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": ST_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (
        tensor.contiguous().view(torch.uint8).numpy() for tensor in tensors.values()
    )
    parts = chain([len(text).to_bytes(8, "little"), text], map(bytes, data))
    path.write_bytes(b"".join(parts))
