"""Which laws are there?

Every file of laws is imported here; the order is that of the concepts.
"""

from ..harness.law import LAWS

ALL_LAWS = tuple(LAWS)
