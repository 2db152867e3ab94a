"""Speculative decoding: the draft tokens of a request as a batch axis.

A small model drafts k tokens, and the large model verifies them in one step. A request then has
k + 1 new tokens: the last accepted token and its drafts. All of them write their keys, and each
attends causally. The large model's output at a token is its choice for the next position. So the
drafts are accepted up to the first one that differs from that choice, and the choice at that place
is a further token ("bonus"). The keys of rejected drafts stay in the cache, past `seq_lens`, where
no query reads them. The next step overwrites their slots.

If all requests have the same number of new tokens, the flat tokens can be viewed as
[reqs, query_len]. Nothing is copied. Decode kernels that take several queries per request expect
this shape.
"""

from ...contract.argument_types import typed
from ...contract.shapes import Output, Query, SpecDecodeQuery
from ...validation.step_shapes import check_spec_decode_output, check_spec_decode_query


@typed
def reshape_query_for_spec_decode(query: Query, batch_size: int) -> SpecDecodeQuery:
    """Return the queries with a batch axis.

    Args:
        query: [tokens, query_heads, head_size], the same number of tokens per request.
        batch_size: number of requests, at least 1.

    Returns:
        [batch_size, query_len, query_heads, head_size], a view.

    Raises:
        ValueError: the query has another number of axes, or the tokens do not divide evenly.

    Source:
        vLLM's function of that name.

    Example:
        >>> query = torch.arange(4.0).view(4, 1, 1)
        >>> reshape_query_for_spec_decode(query, batch_size=2)[:, :, 0, 0]
        tensor([[0., 1.],
                [2., 3.]])
    """
    check_spec_decode_query(query, batch_size)
    query_len = query.shape[0] // batch_size
    return query.view(batch_size, query_len, *query.shape[1:])


@typed
def reshape_attn_output_for_spec_decode(
    attn_output: Output | SpecDecodeQuery,
) -> Output:
    """Return attention's output with one row per token.

    Args:
        attn_output: [reqs, query_len, query_heads, head_size]. A tensor of three axes is
            returned unchanged.

    Returns:
        [tokens, query_heads, head_size], a view.

    Raises:
        ValueError: another number of axes, or requests that are not contiguous in memory.

    Source:
        vLLM's function of that name.

    Example:
        >>> output = torch.arange(4.0).view(2, 2, 1, 1)
        >>> reshape_attn_output_for_spec_decode(output).flatten()
        tensor([0., 1., 2., 3.])
    """
    check_spec_decode_output(attn_output)
    if attn_output.dim() == 3:
        return attn_output
    tokens = attn_output.shape[0] * attn_output.shape[1]
    return attn_output.view(tokens, *attn_output.shape[2:])
