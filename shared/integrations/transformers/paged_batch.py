"""One flat batch of a model's tokens, with the paged KV caches of all layers.

The tokens of all requests are concatenated into one row, as in an engine. The model runs on that
row. Its attention function gets this object from the keyword `pagetwin`, or, where a layer drops
the keyword, from the attention mask of the step. In each layer it writes the new keys and values to
their slots, and computes attention of each new token with its own sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...contract.metadata_classes import CommonAttentionMetadata
from ...recorder import RecordedOperations, Recorder
from ...validation.integrations import check_flat_batch, load_named
from .pages import Pages

BATCH = "_pagetwin_batch"
"""The attribute of a step's mask that holds the batch."""


def batch_of(mask: Tensor | None) -> "PagedBatch | None":
    """Return the batch that made a mask in `model_inputs`; None for any other mask."""
    return None if mask is None else mask.__dict__.get(BATCH)


class PagedBatch:
    """The paged caches of all layers, and the metadata of the current step.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package with the same
            operations.
        num_blocks: blocks in each layer's cache.
        block_size: slots per block.
        device: device of the model.
        recorder: Optional. Checks each step. If None, nothing is checked.

    Raises:
        ValueError: the implementation cannot be loaded.
    """

    def __init__(
        self,
        implementation: str,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        recorder: Recorder | None = None,
    ) -> None:
        self.name = implementation
        self.run: Any = load_named(implementation)
        if recorder is not None:
            self.run = RecordedOperations(self.run, recorder)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.pages: dict[int, Pages] = {}
        self.metadata: CommonAttentionMetadata | None = None
        self.layers_run: set[int] = set()
        """Layers that computed attention with the pages in the current step."""

    def begin_step(
        self,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        block_rows: Sequence[Sequence[int]],
    ) -> None:
        """Set the requests of the next run of the model.

        Args:
            query_lens: [reqs] new tokens of each request.
            num_computed_tokens: [reqs] tokens that are in the cache already.
            block_rows: [reqs] block ids of each request, in sequence order.

        Raises:
            IndexError, ValueError: as in `build_common_attn_metadata`.
        """
        self.layers_run.clear()
        self.metadata = self.run.build_common_attn_metadata(
            query_lens=query_lens,
            num_computed_tokens=num_computed_tokens,
            block_rows=block_rows,
            block_size=self.block_size,
            device=self.device,
        )

    def model_inputs(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the model's keyword arguments for this step.

        Args:
            tokens: [tokens] the new tokens, request after request.

        Raises:
            ValueError: the step has another number of tokens, or no step has begun.
        """
        metadata = check_flat_batch(self.metadata, len(tokens))
        positions = [
            position
            for first, last in zip(
                metadata.num_computed_tokens_cpu.tolist(),
                metadata.seq_lens_cpu.tolist(),
                strict=True,
            )
            for position in range(first, last)
        ]
        # the library passes a mask of four dimensions on unchanged; otherwise it would build a mask
        # of tokens by tokens that is never read
        mask = torch.empty(1, 1, len(tokens), 0, dtype=torch.bool, device=self.device)
        # a layer that drops further keywords still passes its mask on; a call of another model, or
        # of the same one with another mask, does not get this batch
        mask.__dict__[BATCH] = self
        return {
            "input_ids": torch.tensor([list(tokens)], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            "attention_mask": mask,
            "use_cache": False,
            "pagetwin": self,
        }

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Write a layer's new keys and values, and return the attention of each new token.

        Args:
            module: the layer; its `layer_idx` selects the cache.
            query: [1, query_heads, tokens, head_size].
            key: [1, kv_heads, tokens, head_size].
            value: [1, kv_heads, tokens, value_head_size].
            arguments: further arguments of `paged_attention`.

        Returns:
            [1, tokens, query_heads, value_head_size].
        """
        metadata = check_flat_batch(self.metadata, query.shape[2])
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        flat_query, flat_key, flat_value = (
            each[0].transpose(0, 1) for each in (query, key, value)
        )
        if layer not in self.pages:
            self.pages[layer] = Pages.like(
                flat_key, flat_value, self.num_blocks, self.block_size
            )
        pages = self.pages[layer]
        self.run.reshape_and_cache(
            flat_key,
            flat_value,
            pages.key_cache,
            pages.value_cache,
            metadata.slot_mapping,
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
            **arguments,
        )
        self.layers_run.add(layer)
        return out[None]

    def poison(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN in every layer."""
        for pages in self.pages.values():
            pages.poison(blocks)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks in every layer, one (source, destination) pair after another."""
        for pages in self.pages.values():
            pages.copy_blocks(pairs)
