"""Adapter: a solution as an implementation that the laws can judge, with its `Support`."""

import math
import os
from dataclasses import replace
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..base.support import Support
from ..candidates.guard.passed_tensors import PassedTensors
from ..checks.canaries import unchanged
from ..checks.expect import Disagreement
from .definitions import DTYPE, Definition, dtype_of
from .inputs.appends import append_in_parts
from .inputs.calls import (
    draw_columns,
    latent_inputs,
    lengths_of,
    map_heads,
    paged_inputs,
    spread,
    take,
)
from .inputs.indexer import draw_rows, index_inputs, positions_of
from .inputs.selections import place_latents, sparse_inputs
from .solutions import Solution, read_solution
from .sources import import_entry

INTERPRETED = "float32"
"""The dtype of tensors in Triton's interpreter, whose arithmetic in bfloat16 is wrong."""
MOST_KEYS = 1 << 17
"""One more than the longest supported request."""
UNWRITTEN = -2
"""What an output of integers holds before a call."""
OUTPUT_DTYPES = {"float32": torch.float32, "int32": torch.int32}
"""Dtypes of outputs that are not that of the first input."""
SHAPE_OF, DTYPE_OF = "shape of", "dtype of"
"""What the error of an output of the wrong kind begins with."""


def is_interpreted(solution: Solution) -> bool:
    """Return whether the kernels of a solution run in Triton's interpreter."""
    return solution.language == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def support_of(definition: Definition, dtype: str = DTYPE) -> Support:
    """Return the support that the constants of a definition determine.

    Args:
        definition: The definition.
        dtype: The dtype of queries and caches.
    """
    support = Support(
        operations=[definition.family.operation],
        dtypes=[dtype],
        cache_dtypes=[dtype],
        query_lens=[1] if definition.family.is_decode else range(MOST_KEYS),
        seq_lens=range(MOST_KEYS),
        options=["scale", "lse"],
        rejects=[],
    )
    sizes = definition.constants
    if definition.family.operation == "select_keys":
        return Support(operations=["select_keys"], rejects=[])
    if definition.family.operation == "sparse_attention":
        # slots are numbered one after another, so blocks may have any size
        rank, rope = sizes["head_dim_ckv"], sizes["head_dim_kpe"]
        return Support(
            operations=["sparse_attention"],
            dtypes=[dtype],
            cache_dtypes=[dtype],
            head_sizes=[*range(1, rank // 2 + 1), rank + rope],
            options=["scale", "out", "lse", "value_head_size"],
            rejects=[],
        )
    if definition.family.operation == "merge_attn_states":
        return Support(
            operations=["merge_attn_states"], dtypes=[dtype], options=None, rejects=[]
        )
    if definition.family.operation == "reshape_and_cache":
        return Support(
            operations=["reshape_and_cache"],
            dtypes=[dtype],
            cache_dtypes=[dtype],
            options=["value_head_size"],
            rejects=[],
        )
    if "page_size" in sizes:
        support = replace(support, block_sizes=[sizes["page_size"]])
    if "head_dim" not in sizes:
        # the widths of a case are placed in those of the definition
        return replace(support, options=["scale", "lse", "out"])
    group = sizes["num_qo_heads"] // sizes["num_kv_heads"]
    return replace(support, head_sizes=[sizes["head_dim"]], group_sizes=[group])


def load_solution(file: str) -> ModuleType:
    """Return a solution as a module with one operation and SUPPORT.

    Raises:
        FileNotFoundError, ValueError, ImportError: As `read_solution`.
    """
    solution = read_solution(file)
    dtype = INTERPRETED if is_interpreted(solution) else DTYPE
    module = ModuleType(solution.package)
    call = SolutionCall(solution)
    operation = solution.definition.family.operation
    calls = {
        "latent_decode_attention": call.latent_decode,
        "sparse_attention": call.sparse,
        "select_keys": call.select,
        "merge_attn_states": call.merge,
        "reshape_and_cache": call.append,
    }
    setattr(module, operation, calls.get(operation, call.attention))
    module.SUPPORT = support_of(solution.definition, dtype)  # type: ignore[attr-defined]
    module.CALL = call  # type: ignore[attr-defined]
    return module


def _forms_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what the tensors of some inputs are, without their contents."""
    return {
        name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        for name, tensor in inputs.items()
        if isinstance(tensor, Tensor)
    }


@torch.inference_mode(False)
def _clone(tensor: Tensor) -> Tensor:
    """Return a copy that later calls can be written to in any mode."""
    return tensor.clone()


class SolutionCall:
    """Calls of the function of a solution.

    Args:
        solution: The solution. Its sources are imported.
    """

    def __init__(self, solution: Solution) -> None:
        self.solution = solution
        self.definition = solution.definition
        self.function = import_entry(solution)
        self._last: dict[str, Any] = {}
        self._passed = PassedTensors(())

    def run(self, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the outputs for inputs in the definition's order, checked for shape and dtype.

        Raises:
            Disagreement: The solution has changed an input that is only read.
            TypeError, ValueError: An output is not what the definition says.
        """
        inputs = self._in_last_tensors(inputs)
        given = self.prepare(inputs)
        is_append = self.definition.family.operation == "reshape_and_cache"
        with unchanged({} if is_append else inputs):
            found = self.function(*given)
        return self.outputs(inputs, given, found)

    def outputs(
        self, inputs: dict[str, Any], given: list[Any], found: Any
    ) -> tuple[Tensor, ...]:
        """Return all outputs of a call, checked for shape and dtype.

        Args:
            inputs: The inputs in the definition's order.
            given: The arguments of the function.
            found: What it returned.

        Raises:
            Disagreement: An argument refers to other memory than before.
            TypeError, ValueError: An output is not what the definition says.
        """
        if changed := self._passed.changed_by(found):
            right = "results in the memory that is passed"
            raise Disagreement("the call", "as a whole", changed, right)
        forms = self._forms(inputs)
        filled = given[-len(forms) :]
        outputs = self._outputs(filled if self.solution.fills_outputs else found)
        for (name, (shape, dtype)), output in zip(forms.items(), outputs, strict=True):
            if type(output) is not Tensor:
                raise TypeError(f"{name} is {type(output).__name__}: expected a tensor")
            if output.shape != shape:
                wrong = f"{SHAPE_OF} {name} = {list(output.shape)}"
                raise ValueError(f"{wrong}: expected {list(shape)}")
            if output.dtype != dtype:
                raise TypeError(f"{DTYPE_OF} {name} = {output.dtype}: expected {dtype}")
        return outputs

    def _in_last_tensors(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs in the tensors of the last call, if those have the same forms.

        So laws of repeated calls change contents at one address, as an engine does.
        """
        if _forms_of(inputs) != _forms_of(self._last):
            self._last = {
                name: _clone(value) if isinstance(value, Tensor) else value
                for name, value in inputs.items()
            }
            return self._last
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self._last[name].copy_(value)
            else:
                self._last[name] = value
        return self._last

    def prepare(self, inputs: dict[str, Any]) -> list[Any]:
        """Return the arguments of the function. Outputs to fill are full of NaN."""
        given = list(inputs.values())
        if self.solution.fills_outputs:
            given += [
                torch.full(
                    shape,
                    torch.nan if dtype.is_floating_point else UNWRITTEN,
                    dtype=dtype,
                    device=given[0].device,
                )
                for shape, dtype in self._forms(inputs).values()
            ]
        self._passed = PassedTensors(given)
        return given

    def _forms(
        self, inputs: dict[str, Any]
    ) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shape and the dtype of each output, by its name."""
        sizes = dict(self.definition.constants)
        for name, axes in self.definition.inputs.items():
            if axes is not None:
                sizes |= dict(zip(axes, inputs[name].shape, strict=True))
        first = next(iter(inputs.values()))
        return {
            name: (
                torch.Size(sizes[axis] for axis in axes),
                OUTPUT_DTYPES.get(dtype_of(name), first.dtype),
            )
            for name, axes in self.definition.outputs.items()
        }

    def _outputs(self, found: Any) -> tuple[Any, ...]:
        """Return all outputs of a result."""
        names = tuple(self.definition.outputs)
        if len(names) == 1 and isinstance(found, Tensor):
            return (found,)
        if isinstance(found, dict) and set(found) == set(names):
            return tuple(found[name] for name in names)
        if isinstance(found, (tuple, list)) and len(found) == len(names):
            return tuple(found)
        raise TypeError(
            f"{self.solution.entry_name} returned {type(found).__name__}: expected the tensors"
            f" {' and '.join(names)}"
        )

    def attention(
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
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return paged attention: the solution is called with all heads of its definition."""
        arguments = {
            name: argument for name, argument in locals().items() if name != "self"
        }
        sizes = self.definition.constants
        kv_heads, most = key_cache.shape[2], sizes["num_kv_heads"]
        group = query.shape[1] // kv_heads
        out = query.new_zeros(*query.shape[:2], value_cache.shape[3])
        if lse is not None:
            lse.fill_(-torch.inf)
        tokens = lengths_of(arguments).tokens
        for first in range(0, kv_heads, most):
            some = range(first, min(first + most, kv_heads))
            heads = map_heads(some, group, most, seed=tokens + kv_heads)
            found, base_2 = self.run(paged_inputs(self.definition, arguments, heads))
            own = slice(first * group, some.stop * group)
            out[:tokens, own] = found[:, heads.query_places]
            if lse is not None:
                lse[own, :tokens] = base_2[:, heads.query_places].T * math.log(2)
        return out

    def latent_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_cache: Tensor,
        w_uk: Tensor,
        w_uv: Tensor,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
        max_seq_len: int,
        scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return latent attention: the solution attends, and its results are projected here."""
        arguments = {
            name: argument for name, argument in locals().items() if name != "self"
        }
        sizes = self.definition.constants
        count, most = q_nope.shape[1], sizes["num_qo_heads"]
        tokens = lengths_of(arguments).tokens
        if out is None:
            out = q_nope.new_empty(*q_nope.shape[:2], w_uv.shape[2])
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        seed = tokens + count
        columns = (
            draw_columns(w_uk.shape[2], sizes["head_dim_ckv"], seed),
            draw_columns(q_pe.shape[2], sizes["head_dim_kpe"], seed),
        )
        for first in range(0, count, most):
            some = range(first, min(first + most, count))
            heads = map_heads(some, 1, most, seed)
            inputs = latent_inputs(
                self.definition, arguments, heads.kv_sources, columns
            )
            found, base_2 = self.run(inputs)
            latent = found[:, heads.query_places][..., columns[0]].double()
            own = slice(first, some.stop)
            out[:tokens, own] = torch.einsum(
                "thl,hlv->thv", latent, w_uv[own].double()
            ).to(out.dtype)
            if lse is not None:
                lse[own, :tokens] = base_2[:, heads.query_places].T * math.log(2)
        return out

    def sparse(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return attention over selected slots: one KV head after another, as latents."""
        sizes = self.definition.constants
        most, tokens = sizes["num_qo_heads"], len(query)
        kv_heads = key_cache.shape[2]
        group = query.shape[1] // kv_heads
        if out is None:
            out = query.new_empty(*query.shape[:2], value_cache.shape[3])
        if not tokens:
            return out
        scale = query.shape[2] ** -0.5 if scale is None else scale
        for head in range(kv_heads):
            own = slice(head * group, (head + 1) * group)
            caches = key_cache[:, :, head], value_cache[:, :, head]
            latents = place_latents(
                self.definition, query[:, own], caches, seed=tokens + head
            )
            for first in range(0, group, most):
                some = range(first, min(first + most, group))
                heads = map_heads(some, 1, most, seed=tokens + group)
                inputs = sparse_inputs(
                    self.definition, latents, slots, heads.kv_sources, scale
                )
                found, base_2 = self.run(inputs)
                part = slice(own.start + some.start, own.start + some.stop)
                found = found[:, heads.query_places]
                out[:, part] = found[..., latents.value_columns]
                if lse is not None:
                    lse[part] = base_2[:, heads.query_places].T * math.log(2)
        return out

    def select(self, scores: Tensor, topk: int) -> Tensor:
        """Return the positions of the largest scores: an indexer computes their ranks."""
        sizes = self.definition.constants
        selected = torch.full(
            (len(scores), topk), -1, dtype=torch.int32, device=scores.device
        )
        pick = Random(scores.numel() + topk)
        rows = draw_rows(scores, sizes["topk"] - topk, sizes["page_size"], pick)
        if not rows:
            return selected
        (found,) = self.run(index_inputs(self.definition, rows, scores.device, pick))
        for token, (slots, row) in enumerate(zip(found.tolist(), rows, strict=True)):
            own = positions_of(slots, row, sizes["page_size"], topk)
            selected[token, : len(own)] = torch.tensor(
                own, dtype=torch.int32, device=scores.device
            )
        return selected

    def merge(
        self,
        prefix_output: Tensor,
        prefix_lse: Tensor,
        suffix_output: Tensor,
        suffix_lse: Tensor,
        prefill_tokens_with_context: int | None = None,
        output: Tensor | None = None,
        output_lse: Tensor | None = None,
        prefix_lse_base: float = math.e,
        suffix_lse_base: float = math.e,
    ) -> Tensor:
        """Return merged results: the solution merges some heads and columns after another."""
        sizes = self.definition.constants
        most, width = sizes["num_heads"], sizes["head_dim"]
        tokens, count, size = prefix_output.shape
        unit = math.log2(prefix_lse_base)
        if output is None:
            output = torch.empty_like(prefix_output)
        pair = [prefix_output, suffix_output]
        # [tokens, heads] in base 2
        sums = [lse.T.double() * unit for lse in (prefix_lse, suffix_lse)]
        sums = [lse.masked_fill(lse.isinf(), -torch.inf).float() for lse in sums]
        if prefill_tokens_with_context is not None:
            sums[0][prefill_tokens_with_context:] = -torch.inf
        merged, joint = torch.empty_like(output), torch.empty_like(sums[0])
        for first in range(0, count, most):
            some = range(first, min(first + most, count))
            heads = map_heads(some, 1, most, seed=tokens + count)
            for begin in range(0, size, width):
                part = slice(begin, min(begin + width, size))
                columns = draw_columns(part.stop - begin, width, seed=tokens + size)
                states: list[Tensor] = []
                for values, its in zip(pair, sums, strict=True):
                    wide = spread(values[..., part], width, columns)
                    states.append(take(wide, 1, heads.kv_sources).contiguous())
                    states.append(take(its, 1, heads.kv_sources).contiguous())
                names = self.definition.inputs
                found, base_2 = self.run(dict(zip(names, states, strict=True)))
                own = slice(first, some.stop)
                merged[:, own, part] = found[:, heads.query_places][..., columns]
                joint[:, own] = base_2[:, heads.query_places]
        output.copy_(merged)
        if output_lse is not None:
            output_lse.copy_(joint.T.double() / unit)
        return output

    def append(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Write new tokens: the solution appends some heads and elements after another.

        `key_cache` and `value_cache` are modified in place.
        """
        caches = key_cache, value_cache
        append_in_parts(self.definition, self.run, (key, value), caches, slot_mapping)
