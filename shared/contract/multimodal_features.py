"""The images, videos and sounds of a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PREFIX_MODALITIES = ("image", "video")
"""Modalities with bidirectional attention; audio stays causal."""


@dataclass(frozen=True)
class MultiModalFeature:
    """One image, video or sound, and its placeholder tokens.

    Args:
        modality: "image", "video" or another kind.
        offset: position of its first token in the prompt.
        length: number of its tokens.
        is_embed: Optional. [length] whether each token is an embedding, rather than a separator.
            If None, all are.
        identifier: Optional. A string that equal contents share and others do not, such as a hash
            of the image's bytes. If None, the prefix cache cannot tell the content.
    """

    modality: str
    offset: int
    length: int
    is_embed: Sequence[bool] | Tensor | None = None
    identifier: str | None = None
