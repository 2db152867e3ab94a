"""The first position of a sequence that is stored in the cache."""

from ...validation import check_not_negative


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """Return the first position whose key and value need to be stored.

    A prompt under a sliding window leaves only its last `sliding_window` tokens to be seen by
    later ones, so what lies before them gets no slot. A decode stores its token always.

    Args:
        is_prompt: whether the sequence is still in its prompt.
        query_len: new tokens.
        context_len: tokens already in the cache.
        sliding_window: keys a query sees, itself included; None: all.

    Returns:
        A position in the sequence.

    Raises:
        ValueError: a negative length.

    Source:
        vLLM's function of that name, which leaves the context out and so finds no token to
        skip in the later chunks of a prompt.

    Example:
        >>> compute_slot_mapping_start_idx(
        ...     is_prompt=True, query_len=6, context_len=4, sliding_window=8
        ... )
        2
    """
    check_not_negative(query_len=query_len, context_len=context_len)
    if not is_prompt or sliding_window is None:
        return 0
    check_not_negative(sliding_window=sliding_window)
    return max(0, context_len + query_len - sliding_window)
