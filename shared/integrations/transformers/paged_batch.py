"""One flat batch of a model's tokens, with the paged KV caches of all layers.

The tokens of all requests are concatenated into one row, as in an engine. The model runs on that
row. Its attention function gets the step from the keyword `pagetwin`, or, where a layer drops the
keyword, from the attention mask of the step. In each layer it writes the new keys and values to
their slots, and computes attention of each new token with its own sequence.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...recorder import RecordedOperations, Recorder
from ...validation.integrations import (
    check_block_ids,
    load_named,
    read_count,
    read_ids,
    read_rows,
)
from ...validation.library_caches import (
    check_current_step,
    check_no_recorder,
    check_one_row,
    check_owner,
    check_step,
    check_step_length,
    check_tokens,
)
from ...validation.library_formats import read_cache_format
from ...validation.library_models import (
    check_no_padding_positions,
    check_reads_positions,
    check_rope_length,
    check_row_scale,
)
from .models.positions import (
    counts_from_padding,
    ignores_position_ids,
    rope_limit,
    scale_by_position,
    scales_by_row,
)
from .pages import Pages, with_scales
from .steps.step import Step, StepMask


class PagedBatch:
    """The paged caches of all layers of one model, and its current step.

    A step is `begin_step`, then one run of the model on `model_inputs`. Anything else raises an
    error: inputs of an earlier step, a second run of a step, or another model. A deep copy is
    independent of the original.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations.
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        device: device of the model.
        recorder: Optional. Checks each step. If None, nothing is checked.
        cache_format: name of the format of all layers' caches. Given scales are 1.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is less than 1, the implementation cannot be loaded, or no format has
            that name.
    """

    def __init__(
        self,
        implementation: str,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        recorder: Recorder | None = None,
        cache_format: str = "auto",
    ) -> None:
        self.name = implementation
        self.form = read_cache_format(cache_format)
        self.num_blocks = read_count("num_blocks", num_blocks)
        self.block_size = read_count("block_size", block_size)
        self.run: Any = load_named(implementation)
        if recorder is not None:
            self.run = RecordedOperations(self.run, recorder)
        self.device = torch.device(device)
        self.pages: dict[int, Pages] = {}
        self.step: Step | None = None
        self._owners: dict[int, weakref.ref[nn.Module]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled. A copy belongs to the next model that runs on it."""
        check_no_recorder(isinstance(self.run, RecordedOperations))
        return {**self.__dict__, "_owners": {}}

    @property
    def layers_run(self) -> set[int]:
        """Layers that computed attention with the pages in the current step."""
        return set() if self.step is None else self.step.layers_run

    def begin_step(
        self,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        block_rows: Sequence[Sequence[int]],
    ) -> None:
        """Set the requests of the next run of the model. Inputs of earlier steps become invalid.

        Args:
            query_lens: [reqs] new tokens of each request, in total at least one.
            num_computed_tokens: [reqs] tokens that are in the cache already.
            block_rows: [reqs] block ids of each request, in sequence order.

        Raises:
            TypeError: an entry is not an integer.
            IndexError, ValueError: as in `build_common_attn_metadata`; a block id is outside the
                cache; no request has a new token. The step before stays the current one.
        """
        lengths = read_ids("query_lens", query_lens)
        rows = read_rows("block_rows", block_rows)
        check_step_length(lengths)
        check_block_ids("block_rows", rows, self.num_blocks)
        metadata = self.run.build_common_attn_metadata(
            query_lens=lengths,
            num_computed_tokens=read_ids("num_computed_tokens", num_computed_tokens),
            block_rows=rows,
            block_size=self.block_size,
            device=self.device,
        )
        self.step = Step(self, metadata)

    def model_inputs(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the model's keyword arguments for this step.

        Args:
            tokens: [tokens] the new tokens, request after request.

        Raises:
            TypeError: a token is not an integer.
            ValueError: the step has another number of tokens, or no step has begun.
        """
        ids = read_ids("tokens", tokens)
        step: Step = check_step(self.step)
        check_tokens(step.metadata.num_actual_tokens, len(ids))
        return {
            "input_ids": torch.tensor([ids], device=self.device),
            "position_ids": torch.tensor([step.positions], device=self.device),
            "attention_mask": StepMask.of(step),
            "use_cache": False,
            "pagetwin": step,
        }

    def attend(
        self,
        step: Step,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Write a layer's new keys and values, and return the attention of each new token.

        Args:
            step: the step whose inputs the model got.
            module: the layer; its `layer_idx` selects the cache.
            query: [1, query_heads, tokens, head_size].
            key: [1, kv_heads, tokens, head_size].
            value: [1, kv_heads, tokens, value_head_size].
            arguments: further arguments of `paged_attention`.

        Returns:
            [1, tokens, query_heads, value_head_size].

        Raises:
            NotImplementedError: the model does not take the positions of the step exactly.
            ValueError: the step is not the current one, the layer has run in it already, the pages
                are those of another model, or the cache format does not take its head size.
        """
        metadata = step.metadata
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        check_current_step(step is self.step, layer, layer in step.layers_run)
        check_one_row(query, key, metadata.num_actual_tokens)
        self._check_model(module, layer, step, arguments)
        flat_query, flat_key, flat_value = (
            states[0].transpose(0, 1) for states in (query, key, value)
        )
        if scales_by_row(module):
            flat_query = scale_by_position(module, flat_query, step.positions)
        pages = self.pages.get(layer) or Pages.like(
            flat_key, flat_value, self.num_blocks, self.block_size, self.form,
            type(module).__name__,
        )  # fmt: skip
        self.run.reshape_and_cache(
            flat_key,
            flat_value,
            pages.key_cache,
            pages.value_cache,
            metadata.slot_mapping,
            **pages.of_write,
        )
        out: Tensor = self.run.paged_attention(
            flat_query,
            pages.key_cache,
            pages.value_cache,
            metadata.block_table_tensor,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.max_query_len,
            metadata.max_seq_len,
            **with_scales(arguments, pages),
        )
        self.pages[layer], self._owners[layer] = pages, weakref.ref(module)
        step.layers_run.add(layer)
        return out[None]

    def _check_model(
        self, module: Any, layer: int, step: Step, arguments: dict[str, Any]
    ) -> None:
        """Raise if a layer is not that of the batch, or does not take positions exactly."""
        name, config = type(module).__name__, getattr(module, "config", None)
        metadata = step.metadata
        if layer in self._owners:
            check_owner("PagedBatch", layer, name, self._owners[layer]() is module)
        else:
            has_slopes = arguments["options"].alibi_slopes is not None
            check_reads_positions(name, not has_slopes and ignores_position_ids(module))
            check_no_padding_positions(name, counts_from_padding(module))
        check_rope_length(name, metadata.max_seq_len, rope_limit(config))
        if scales_by_row(module):
            check_row_scale(name, metadata.num_actual_tokens, module.floor_scale)

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks in every layer so that a read of them gives NaN.

        Raises:
            IndexError: a block id is outside the cache. Nothing has changed.
        """
        ids = read_ids("blocks", blocks)
        check_block_ids("blocks", [ids], self.num_blocks)
        for pages in self.pages.values():
            pages.poison(ids)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer, one (source, destination) pair after another.

        Raises:
            IndexError: a block id is outside the cache. Nothing has changed.
        """
        rows = read_rows("pairs", pairs)
        check_block_ids("pairs", rows, self.num_blocks)
        for pages in self.pages.values():
            pages.copy_blocks([(source, destination) for source, destination in rows])
