"""The steps of a scheduler whose requests arrive over time."""

from ...reference.batch.arrivals import schedule_arrivals

__all__ = ["schedule_arrivals"]
