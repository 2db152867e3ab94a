"""Attention libraries that the benchmark can call, one file per library."""

from .registry import all_libraries as all_libraries
from .registry import choose_libraries as choose_libraries
