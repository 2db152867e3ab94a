"""Request: the queries of one request, its keys, and their positions in the sequence."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Request:
    """Queries of one request, and the keys that they are compared with.

    Args:
        index: Number of the request in the batch.
        rows: Rows of its queries in the batch.
        keys: [keys] int64, indices of its keys in the sequence.
        query_position: [queries]. Negative where there are more queries than keys.
        key_position: [keys]. The same as `keys`, except that siblings in a tree share a position.
        tree: Optional. [queries, new keys] bool, which new token attends to which. If None, the
            request has no tree.
    """

    index: int
    rows: slice
    keys: Tensor
    query_position: Tensor
    key_position: Tensor
    tree: Tensor | None

    @property
    def distance(self) -> Tensor:
        """[queries, keys] key position - query position."""
        return self.key_position[None, :] - self.query_position[:, None]
