"""Ranges of keys that no mask hides: images whose tokens attend to each other, and prompts (R-SWA).

vLLM gives the positions of images (`mm_req_doc_ranges`) on the host, and the lengths of prompts
(`rswa_prefix_lens`) where its runner has them. Here they become one range per new token.

An image's tokens are new in a prompt or a chunk of one, and vLLM never divides an image between two
steps, unless its first tokens are cached already. So ranges of images never reach a step of decodes
with one new token: its last key is the token itself, and the other keys of its image are as far
away as its window, or causal.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.operations import Implementation


class StepRanges:
    """What the layers of a metadata builder need of images and prompts, step by step.

    Args:
        run: the implementation, which fills the ranges in.
        vllm_config: vLLM's configuration.
        layers: vLLM's layers.
        device: device of attention.

    Attributes:
        rswa_window: Optional. Keys that a generated token attends to beside its prompt. If None,
            layers have windows of their own.
        has_images: whether the tokens of an image attend to each other.

    Raises:
        NotImplementedError: a model with both, or with one of them and ranks that share keys, or
            with images and drafts that are trimmed on the device.
    """

    def __init__(
        self, run: Implementation, vllm_config: Any, layers: Sequence[Any], device: Any
    ) -> None:
        model = vllm_config.model_config
        self.run, self.device = run, device
        self.rswa_window: int | None = getattr(model, "rswa_window", None)
        self.has_images = bool(getattr(model, "is_mm_prefix_lm", False))
        self.clamps = {clamp_of(layer) for layer in layers} or {None}
        self.of_prompts: Tensor | None = None
        if self and any(getattr(layer.impl, "shared", None) for layer in layers):
            raise NotImplementedError(
                f"{'rswa_window' if self.rswa_window else 'is_mm_prefix_lm'} with"
                " decode_context_parallel_size above 1: expected 1, since a rank does not know the"
                " positions of its keys; or choose another --attention-backend"
            )
        speculative = getattr(vllm_config, "speculative_config", None)
        if self.has_images and getattr(
            speculative, "enable_adaptive_verification", False
        ):
            raise NotImplementedError(
                "is_mm_prefix_lm with enable_adaptive_verification: expected one of them, since"
                " ranges of images are placed by the query lengths of the host; or choose another"
                " --attention-backend"
            )
        if self.rswa_window is None:
            return
        if self.has_images:
            raise NotImplementedError(
                "rswa_window with is_mm_prefix_lm: expected one of them, since a token has one"
                " range; choose another --attention-backend"
            )
        rows = int(vllm_config.scheduler_config.max_num_batched_tokens)
        # captured graphs read this buffer, so it is filled in before each step
        self.of_prompts = torch.full((rows, 2), -1, dtype=torch.int32, device=device)

    def __bool__(self) -> bool:
        """Return whether any step may have a range."""
        return self.has_images or self.rswa_window is not None

    def of_options(self, options: AttentionOptions) -> tuple[AttentionOptions, ...]:
        """Return the options that a layer's steps have: with ranges, and without if some have none.

        Args:
            options: the layer's own.
        """
        if not self:
            return (options,)
        none = torch.full((1, 2), -1, dtype=torch.int32, device=self.device)
        if self.rswa_window is not None:
            window = self.rswa_window
            return (replace(options, query_ranges=none, sliding_window=window),)
        return (options, replace(options, query_ranges=none))

    def of_step(self, common: Any) -> dict[int | None, Tensor]:
        """Return the ranges of a step by the window that clamps them; empty if none is in a range.

        Args:
            common: vLLM's `CommonAttentionMetadata`.
        """
        if self.of_prompts is not None:
            return {None: self._fill_prompts(common, self.of_prompts)}
        images = common.mm_req_doc_ranges if self.has_images else None
        if not images:
            return {}
        return self._fill_images(common, images)

    def _fill_prompts(self, common: Any, buffer: Tensor) -> Tensor:
        """Return the ranges of the prompts, in the buffer that graphs read."""
        reqs, rows = common.num_reqs, buffer[: common.num_actual_tokens]
        prompts = common.rswa_prefix_lens
        if prompts is None:  # a dummy step
            return rows.fill_(-1)
        self.run.fill_rswa_query_ranges(
            rows,
            prompts[:reqs].to(self.device, torch.int32, non_blocking=True),
            common.query_start_loc[: reqs + 1],
            common.seq_lens[:reqs],
        )
        return rows

    def _fill_images(
        self, common: Any, images: dict[int, list[tuple[int, int]]]
    ) -> dict[int | None, Tensor]:
        """Return the ranges of the images that new tokens are in. The device is not waited for."""
        reqs, rows = common.num_reqs, common.num_actual_tokens
        # exact for prompts; those of decodes may be too long, and are past all images then
        lens = common.seq_lens_cpu_upper_bound
        lens = common.seq_lens.cpu() if lens is None else lens
        starts = common.query_start_loc_cpu[: reqs + 1].to(torch.int32)
        pinned = torch.device(self.device).type == "cuda"
        found = {}
        for window in self.clamps:
            # torch keeps pinned memory until copies from it have ended
            out = torch.full((rows, 2), -1, dtype=torch.int32, pin_memory=pinned)
            given = {req: spans for req, spans in images.items() if req < reqs}
            if not self.run.fill_mm_prefix_query_ranges(
                out,
                given,
                starts,
                lens[:reqs].to(torch.int32),
                window,
                window is not None,
            ):
                return {}
            found[window] = out.to(self.device, non_blocking=True)
        return found


def clamp_of(layer: Any) -> int | None:
    """Return the window within which a layer's images attend to each other; None if any keys.

    Gemma 4 masks (causal or image) and window, others (causal and window) or image.
    """
    impl = getattr(layer, "impl", None)
    if not getattr(layer, "mm_prefix_clamp_sliding_window", False):
        return None
    window: int | None = getattr(impl, "sliding_window", None)
    return window
