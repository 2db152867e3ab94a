"""How do a request's drafted tokens become a batch of their own axis?

A view costs nothing, so this file is the reference's word for word.
"""

from ...contract.shapes import Output, Query, SpecDecodeQuery
from ...validation.step_shapes import check_spec_decode_output, check_spec_decode_query


def reshape_query_for_spec_decode(query: Query, batch_size: int) -> SpecDecodeQuery:
    """Return the queries with an axis for the requests."""
    check_spec_decode_query(query, batch_size)
    query_len = query.shape[0] // batch_size
    return query.view(batch_size, query_len, *query.shape[1:])


def reshape_attn_output_for_spec_decode(
    attn_output: Output | SpecDecodeQuery,
) -> Output:
    """Return attention's output with one row a token again."""
    check_spec_decode_output(attn_output)
    if attn_output.dim() == 3:
        return attn_output
    return attn_output.view(-1, *attn_output.shape[2:])
