"""Validation of the scales of a cache with two codes per byte and one scale per token and head."""

from .int8_per_token_head import validate as validate
