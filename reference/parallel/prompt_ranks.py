"""Ranks that compute chunks of the same prompts: the group, and the begin of a step."""

from collections.abc import Sequence

import torch

from ...contract.argument_types import typed
from ...engine.rank_agreement import agree_on_prompts
from ...engine.rank_group import RankGroup
from ...validation.parallel import check_prefill_share


@typed
class PromptRanks:
    """A rank of a group whose ranks share the prompts of each step.

    Args:
        ranks: The group.
        block_size: Slots in a block of keys.
        device: Of the tokens.

    Raises:
        ValueError: `block_size` is below 1.
        RankError: The ranks do not agree on the block size.
    """

    def __init__(
        self,
        ranks: RankGroup,
        block_size: int = 16,
        device: torch.device | str = "cpu",
    ) -> None:
        """Compare the arguments among the ranks."""
        check_prefill_share([], block_size)
        self.ranks = ranks
        self.block_size = block_size
        self.device = torch.device(device)
        ranks.agree(
            torch=torch.__version__.split("+")[0],
            block_size=block_size,
            implementation=type(self).__module__,
        )

    def _begin_step(self, query_lens: Sequence[int], is_compared: bool = True) -> None:
        """Begin a step of these prompts.

        Args:
            query_lens: Tokens of each prompt.
            is_compared: Whether the prompts are compared among the ranks.

        Raises:
            ValueError: A length is negative.
            RankError: The ranks do not agree on the prompts.
        """
        check_prefill_share(query_lens, self.block_size)
        self.ranks.begin_step()
        self.ranks.wait("a share of the prompts is copied to the device")
        if is_compared:
            agree_on_prompts(self.ranks, query_lens)
