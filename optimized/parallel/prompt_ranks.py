"""Ranks that compute chunks of the same prompts: the group, and the begin of a step."""

from ...reference.parallel.prompt_ranks import PromptRanks

__all__ = ["PromptRanks"]
