"""What happened while the answers were made?"""

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Statistics:
    """What `generate` did; all counts start at 0 and are added to.

    Args:
        keep_logits: whether each new token's logits are kept.
        steps: runs of the model; of an encoder-decoder model, of its decoder.
        encoder_runs: runs of the encoder.
        mixed_steps: steps in which some requests decoded and others were in their prompt.
        chunked_prompts: prompts that took more than one step.
        preemptions: requests that gave their blocks back and started over.
        shared_blocks: blocks that a request found filled with its own beginning.
        calls: for each attention module, by its name in the model, how often it ran on a twin.
        logits: for each prompt [new_tokens, vocabulary] what its tokens were chosen by; empty
            unless kept.
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
