"""How does one flat batch of a model's tokens find its pages?

The tokens of all requests stand in one row, request after request, as in an engine. The model is
run on that row and hands this object on to its attention, which asks it in each layer: it writes
the layer's new keys and values to their slots, and lets each new token see its own sequence.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...contract.attention_options import pack_options
from ...contract.metadata_classes import CommonAttentionMetadata
from ...validation.integrations import check_flat_batch, load_named
from .pages import Pages


class PagedBatch:
    """The pages of all layers, and the step that is run.

    Args:
        implementation: "reference", "optimized", or the dotted name of a package with the same
            files.
        num_blocks: blocks in each layer's cache.
        block_size: slots in a block.
        device: where the model lies.

    Raises:
        ValueError: an implementation that cannot be loaded.
    """

    def __init__(
        self,
        implementation: str,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
    ) -> None:
        self.name = implementation
        self.run = load_named(implementation)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        self.pages: dict[int, Pages] = {}
        self.metadata: CommonAttentionMetadata | None = None

    def begin_step(
        self,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        block_rows: Sequence[Sequence[int]],
    ) -> None:
        """Set which requests the next run of the model consists of.

        Args:
            query_lens: [reqs] new tokens of each.
            num_computed_tokens: [reqs] tokens already in the cache.
            block_rows: [reqs] block ids of each, in sequence order.

        Raises:
            IndexError, ValueError: what `build_common_attn_metadata` refuses.
        """
        self.metadata = self.run.build_common_attn_metadata(
            query_lens=query_lens,
            num_computed_tokens=num_computed_tokens,
            block_rows=block_rows,
            block_size=self.block_size,
            device=self.device,
        )

    def model_inputs(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return what the model is called with in this step.

        Args:
            tokens: [tokens] the new tokens, request after request.

        Raises:
            ValueError: another number of tokens than the step has, or no step.
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
        return {
            "input_ids": torch.tensor([list(tokens)], device=self.device),
            "position_ids": torch.tensor([positions], device=self.device),
            # four dimensions are passed on as they are: the library then builds no mask of tokens
            # by tokens, which nobody would read
            "attention_mask": torch.empty(
                1, 1, len(tokens), 0, dtype=torch.bool, device=self.device
            ),
            "use_cache": False,
            "pagetwin": self,
        }

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Write a layer's new keys and values, and return what each new token sees.

        Args:
            module: the layer, whose `layer_idx` says which pages are its own.
            query: [1, query_heads, tokens, head_size].
            key: [1, kv_heads, tokens, head_size].
            value: [1, kv_heads, tokens, value_head_size].
            options: passed on to `paged_attention`.

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
            **pack_options(**options),
        )
        return out[None]

    def forget(self, blocks: Sequence[int]) -> None:
        """Fill blocks with NaN in every layer."""
        for pages in self.pages.values():
            pages.forget(blocks)
