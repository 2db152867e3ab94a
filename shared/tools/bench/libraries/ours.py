"""pagetwin: the operations of `pagetwin.optimized`, and two baselines that are ours too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from ....contract.operations import load_implementation
from ..inputs import Inputs
from ..sparse.inputs import IndexInputs, SelectInputs, SparseInputs
from .launches import watch_launches
from .library import AttentionLibrary, Declined, Prepared


def name_tables(device: str) -> str:
    """Return the fingerprint of the tables that ours is planned from, and their file's name.

    Raises:
        OSError, ValueError: The file that PAGETWIN_TUNING names cannot be read, or does not fit.
    """
    return str(import_module("pagetwin.optimized").tuning_in_use(device))


class Ours(AttentionLibrary):
    """The operations of `pagetwin.optimized`."""

    name, title = "ours", "pagetwin"

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        with watch_launches(load_implementation("optimized")) as found:
            yield found

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        twin: Any = load_implementation("optimized")
        k_scale, v_scale = inputs.scales
        k_global, v_global = inputs.global_scales
        if workload.kind == "write":
            return Prepared(
                lambda: twin.reshape_and_cache(
                    inputs.key,
                    inputs.value,
                    inputs.key_cache,
                    inputs.value_cache,
                    inputs.slot_mapping,
                    k_scale,
                    v_scale,
                    workload.cache_format,
                    k_global,
                    v_global,
                )
            )
        out = inputs.fresh()
        lens: tuple[int, ...] = (inputs.max_query_len, inputs.max_seq_len)
        if workload.kind == "encoder":
            starts, of_encoder = inputs.query_start_loc, inputs.options()
            return Prepared(
                lambda: twin.encoder_attention(
                    inputs.query,
                    inputs.key,
                    inputs.value,
                    starts,
                    starts,
                    *lens,
                    out=out,
                    options=of_encoder,
                )
            )
        options = replace(
            inputs.options(),
            k_scale=k_scale,
            v_scale=v_scale,
            k_global_scale=k_global,
            v_global_scale=v_global,
            batch_invariant=workload.batch_invariant,
        )
        attend, note = twin.paged_attention, ""
        if workload.kind == "cascade":
            attend, lens = twin.cascade_attention, (*lens, workload.shared_prefix)
        arguments: dict[str, Any] = {"out": out, "options": options}
        if workload.kind == "latent":
            arguments["scale"] = workload.scale
            note = "attention over latents alone, without the projections around it"
        return Prepared(
            lambda: attend(
                inputs.query,
                inputs.key_cache,
                inputs.value_cache,
                inputs.block_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                *lens,
                **arguments,
            ),
            note=note,
        )

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        workload, out = inputs.workload, inputs.fresh()
        twin: Any = load_implementation("optimized")
        return Prepared(
            lambda: twin.sparse_attention(
                inputs.query,
                inputs.key_cache,
                inputs.value_cache,
                inputs.slots,
                workload.scale,
                out=out,
            ),
            note="attention alone: no projections, no conversion of positions to slots",
        )

    def prepare_scores(self, inputs: IndexInputs) -> Prepared:
        twin: Any = load_implementation("optimized")
        return Prepared(
            lambda: twin.index_scores(
                inputs.query,
                inputs.weights,
                inputs.kv_cache,
                inputs.block_table,
                inputs.query_start_loc,
                inputs.seq_lens,
                inputs.max_seq_len,
            ),
            rows=lambda scores: scores[:, None],
        )

    def prepare_selection(self, inputs: SelectInputs) -> Prepared:
        twin: Any = load_implementation("optimized")
        topk = inputs.workload.selected
        return Prepared(lambda: twin.select_keys(inputs.scores, topk))


class OursPlain(Ours):
    """Ours without `batch_invariant`: what batch invariance costs."""

    name, title = "ours-plain", "pagetwin without batch_invariant"

    def prepare(self, inputs: Inputs) -> Prepared:
        if self.name not in inputs.workload.baselines:
            raise Declined("the workload does not name it as a baseline")
        workload = replace(inputs.workload, batch_invariant=False)
        return super().prepare(replace(inputs, workload=workload))


class OursUnquantised(Ours):
    """Ours with the numbers of a cache of codes in a 16-bit cache: what codes cost or gain."""

    name, title = "ours-bf16", "pagetwin, cache in bf16"

    def prepare(self, inputs: Inputs) -> Prepared:
        workload = inputs.workload
        if self.name not in workload.baselines:
            raise Declined("the workload does not name it as a baseline")
        if workload.kind == "write":
            raise Declined("it would write another cache")
        caches = inputs.numbers(slice(None), workload.dtype)
        return super().prepare(
            replace(
                inputs,
                workload=replace(
                    workload, kv_dtype=workload.dtype, cache_format=None, in_page=False
                ),
                key_cache=caches[0],
                value_cache=caches[1],
                k_scale=None,
                v_scale=None,
            )
        )
