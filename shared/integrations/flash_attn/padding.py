"""The functions of `flash_attn.bert_padding` that callers import: tokens without their padding."""

import torch
from torch import Tensor


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of the first axis."""
    return values[indices]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the tokens of a padded batch, request after request.

    Args:
        hidden_states: [batch, tokens, ...].
        attention_mask: [batch, tokens], not 0 where there is a token.
        unused_mask: Optional. Further places that are kept, without a token.

    Returns:
        The tokens [total, ...], their indices in the flat batch, the starts [batch + 1] int32, the
        largest length, and the number of tokens of each request [batch] int32.
    """
    kept = attention_mask.bool()
    if unused_mask is not None:
        kept = kept | unused_mask.bool()
    lengths = kept.sum(1, dtype=torch.int32)
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = kept.flatten().nonzero()[:, 0]
    used = attention_mask.sum(1, dtype=torch.int32)
    flat = hidden_states.flatten(0, 1)
    return flat[indices], indices, starts, int(lengths.max()), used


def pad_input(
    hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int
) -> Tensor:
    """Return a padded batch [batch, seqlen, ...] with 0 where no token is."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    padded[indices] = hidden_states
    return padded.view(batch, seqlen, *hidden_states.shape[1:])
