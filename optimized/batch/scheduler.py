"""Scheduler: which request computes how many tokens in the next step."""

from ...reference.batch.scheduler import Scheduler

__all__ = ["Scheduler"]
