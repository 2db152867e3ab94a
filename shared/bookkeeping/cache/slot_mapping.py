"""The first position of a sequence that is stored in the cache."""

from ...validation import check_not_negative


def compute_slot_mapping_start_idx(
    is_prompt: bool, query_len: int, context_len: int, sliding_window: int | None
) -> int:
    """Return the first position whose key and value need to be stored.

    With a sliding window, later tokens see only the last `sliding_window` tokens of a prompt, so
    earlier tokens get no slot. A decode always stores its token.

    Args:
        is_prompt: whether the sequence is still in its prompt.
        query_len: new tokens.
        context_len: tokens already in the cache.
        sliding_window: Optional. Number of visible keys, the query's own included. If None, all
            keys are visible.

    Returns:
        A position in the sequence.

    Raises:
        ValueError: a negative length.

    Source:
        vLLM's function of that name.

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
