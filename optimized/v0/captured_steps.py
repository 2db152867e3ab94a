"""The captured steps of a model: the buffers they read, and the choice of the step to replay."""

from ...reference.v0.captured_steps import CapturedSteps

__all__ = ["CapturedSteps"]
