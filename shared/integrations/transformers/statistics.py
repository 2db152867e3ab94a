"""Counters of one call of `generate`."""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Statistics:
    """What `generate` did. Counts start at 0, and each call adds to them.

    Args:
        keep_logits: whether the logits of each new token are kept.
        steps: runs of the model; for an encoder-decoder model, runs of its decoder.
        encoder_runs: runs of the encoder.
        mixed_steps: steps with requests that decode and requests that prefill.
        chunked_prompts: prompts that took more than one step.
        preemptions: how often a request lost its blocks and was computed again.
        shared_blocks: blocks that requests found in the prefix cache.
        calls: for each attention module, by its name in the model, its runs on a twin.
        logits: for each prompt [new_tokens, vocabulary] the logits of its new tokens. Empty unless
            kept.
    """

    keep_logits: bool = False
    steps: int = 0
    encoder_runs: int = 0
    mixed_steps: int = 0
    chunked_prompts: int = 0
    preemptions: int = 0
    shared_blocks: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    logits: list[Tensor] = field(default_factory=list)
