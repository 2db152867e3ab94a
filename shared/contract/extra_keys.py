"""Extra keys: what a sequence's keys and values depend on besides its tokens."""

from dataclasses import dataclass

from .checks import check_features_named, check_names
from .multimodal_features import MultiModalFeature


@dataclass(frozen=True)
class ExtraKeys:
    """What the keys and values of a sequence depend on besides its tokens.

    Two sequences share blocks only if all of it is equal.

    Args:
        lora_name: Optional. The LoRA adapter that computes the sequence. If None, none does.
        cache_salt: Optional. Only sequences of the same salt share blocks, so that the latency of
            an answer does not tell what others have asked. If None, the sequence has no salt.
        mm_features: images, videos and sounds in the prompt, each with its identifier. Their
            placeholder tokens are equal, whatever they show.

    Raises:
        TypeError, ValueError: a name is not a string or empty, or a feature has no identifier.

    Source:
        vLLM's `generate_block_hash_extra_keys`, which reads them from a request.

    Example:
        >>> ExtraKeys(lora_name="sql", cache_salt="tenant 7").mm_features
        ()
    """

    lora_name: str | None = None
    cache_salt: str | None = None
    mm_features: tuple[MultiModalFeature, ...] = ()

    def __post_init__(self) -> None:
        check_names(lora_name=self.lora_name, cache_salt=self.cache_salt)
        check_features_named(self.mm_features)
        object.__setattr__(self, "mm_features", tuple(self.mm_features))


NO_EXTRA_KEYS = ExtraKeys()
"""Those of a sequence that is determined by its tokens."""


def check_extra_keys(extra_keys: object) -> None:
    """Raise TypeError for an object of another class."""
    if not isinstance(extra_keys, ExtraKeys):
        raise TypeError(
            f"extra_keys = {extra_keys!r:.60}: expected ExtraKeys, such as"
            " ExtraKeys(cache_salt='a')"
        )
