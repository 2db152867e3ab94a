"""Which laws are there?

Every file of laws is imported here; the order is that of the concepts.
"""

from . import laws_of_slots as laws_of_slots
from .law import LAWS

ALL_LAWS = tuple(LAWS)
