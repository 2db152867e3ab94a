"""torch: the largest scores by `topk`, and an indexer's scores as products of matrices."""

import torch
from torch import Tensor

from .....contract.indexer_cache import split_indexer_cache
from ...inputs import Inputs
from ...sparse.inputs import FP8, IndexInputs, SelectInputs, SparseInputs
from ..library import AttentionLibrary, Declined, Prepared


class TorchSparse(AttentionLibrary):
    """A part of sparse attention that is not attention."""

    package = "torch"

    def prepare(self, inputs: Inputs) -> Prepared:
        raise Declined("it computes no attention")

    def prepare_sparse(self, inputs: SparseInputs) -> Prepared:
        return self.prepare(inputs)


class TorchTopk(TorchSparse):
    """torch's `topk`, whose order of equal scores is not defined."""

    name, title = "torch-topk", "torch, topk"

    def prepare_selection(self, inputs: SelectInputs) -> Prepared:
        scores, topk = inputs.scores, inputs.workload.selected

        def call() -> Tensor:
            return scores.topk(topk, dim=1, sorted=False).indices

        return Prepared(call, note="positions of 64 bits, in any order")


class TorchScores(TorchSparse):
    """An indexer's scores by two products in bfloat16, over keys that were gathered before."""

    name, title = "torch-scores", "torch, matrix products"

    def prepare_scores(self, inputs: IndexInputs) -> Prepared:
        workload = inputs.workload
        if set(workload.query_lens) != {1} or workload.is_ragged:
            raise Declined("it takes one token of each request, and equal lengths")
        codes, scales = split_indexer_cache(inputs.kv_cache)
        blocks = inputs.block_table.long()
        keys = codes[blocks].view(FP8).to(torch.bfloat16).flatten(1, 2)
        keys = keys[:, : inputs.max_seq_len].transpose(1, 2).contiguous()
        scale = scales[blocks].flatten(1)[:, : inputs.max_seq_len].contiguous()
        query = inputs.query.to(torch.bfloat16)
        weights = inputs.weights[:, None]

        def call() -> Tensor:
            products = torch.bmm(query, keys).relu_().float()
            return torch.bmm(weights, products) * scale[:, None]

        return Prepared(
            call,
            note="keys gathered and converted in advance",
            same_work=False,
            rounds_more=True,
        )
