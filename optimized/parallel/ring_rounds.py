"""Rounds of a ring: the keys that a rank's chunks attend to while each rank's share is held."""

from ...reference.parallel.ring_rounds import list_rounds

__all__ = ["list_rounds"]
