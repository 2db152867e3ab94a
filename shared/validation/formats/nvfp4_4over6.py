"""Validation of block scales that a write measures, of which the better of two is stored."""

from .nvfp4 import validate as validate
