"""The settings of one call of `generate`."""

from dataclasses import dataclass

from .sampling.sampler import Sampler
from .sampling.streams import Streams


@dataclass(frozen=True)
class Settings:
    """The settings that decoder-only and encoder-decoder models share.

    Args:
        implementation, max_new_tokens, block_size, num_blocks, max_batch_tokens, max_running: as
            in `generate`.
        cache_format: the same.
        stop_token_ids: token ids that end an output.
        sampler: chooses the tokens.
        streams: pass the tokens on while the call runs.
    """

    implementation: str
    max_new_tokens: int
    block_size: int
    num_blocks: int | None
    max_batch_tokens: int
    max_running: int
    stop_token_ids: frozenset[int]
    sampler: Sampler
    streams: Streams
    cache_format: str = "auto"

    def blocks_of(self, num_tokens: int) -> int:
        """Return the number of blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)
