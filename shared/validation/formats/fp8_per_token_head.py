"""Validation of the scales of an FP8 cache with one scale per token and head."""

from .int8_per_token_head import validate as validate
