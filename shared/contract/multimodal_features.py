"""Where in a prompt do an image's tokens stand?"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PREFIX_MODALITIES = ("image", "video")
"""What a prompt's tokens may look at in both directions; sound stays causal."""


@dataclass(frozen=True)
class MultiModalFeature:
    """One image, video or sound, and the tokens that stand for it.

    Args:
        modality: "image", "video" or another kind.
        offset: position of its first token in the prompt.
        length: how many tokens it takes.
        is_embed: [length] which of them are its embeddings and not marks between them; None:
            all.
    """

    modality: str
    offset: int
    length: int
    is_embed: Sequence[bool] | Tensor | None = None
