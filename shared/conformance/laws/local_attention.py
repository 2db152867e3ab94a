"""Laws of chunked local attention: each token attends only to keys of its own chunk.

Every chunk with new tokens becomes a virtual request. These chunks, and the visible range of each
token, are computed here position by position.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st

from ..candidates.setting import Setting
from ..cases.steps import (
    LONG,
    MANY,
    PROMPT,
    Requests,
    bare_step,
    counts,
    draw_requests,
    flags_of,
    several,
    table_of,
    whole_step,
)
from ..checks.expect import expect_rejection, expect_same
from ..checks.metadata import (
    expect_fields,
    expect_numbers,
    expect_rows,
    expect_unchanged,
    remember,
    seen_by,
    values_of,
)
from .law import law

REJECTED_BESIDE = ("mm_req_doc_ranges", "tree_mask")
LEFT_OUT = (
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "max_encoder_seq_len",
    "encoder_query_start_loc",
    "encoder_query_start_loc_cpu",
    "cross_block_table_tensor",
    "cross_slot_mapping",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
)
"""Fields of encoders and of ranks; they describe whole requests."""


@dataclass(frozen=True)
class Chunked:
    """A step of layers with chunked local attention.

    Args:
        step: The requests.
        blocks: The number of blocks per chunk.
        spare: The number of columns of the block table past the end of the longest row.
        flag: Optional. One `causal` flag for all requests. If None, there is one per request.
    """

    step: Requests
    blocks: int
    spare: int = 0
    flag: bool | None = None

    @property
    def chunk(self) -> int:
        """The number of positions per chunk."""
        return self.blocks * self.step.block_size

    def virtual(self) -> list[tuple[int, int, int, int]]:
        """Return the request, chunk index, new tokens and keys of each virtual request."""
        found = []
        for req, seq_len in enumerate(self.step.seq_lens):
            own = range(self.step.computed[req], seq_len)
            chunks = sorted({position // self.chunk for position in own})
            for number in chunks or [max(seq_len - 1, 0) // self.chunk]:
                positions = range(number * self.chunk, (number + 1) * self.chunk)
                new = sum(position in own for position in positions)
                keys = sum(position < seq_len for position in positions)
                found.append((req, number, new, keys))
        return found


@st.composite
def chunked(draw: st.DrawFn) -> Chunked:
    """Return steps whose contexts end before, at and after the edge of a chunk."""
    pick = Random(draw(st.integers(0, 2**20)))
    step = draw_requests(pick)
    blocks = pick.choice([1, 1, 2, 3])
    chunk = blocks * step.block_size
    edges = [0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk - 1]
    if pick.random() < 0.7:
        step = replace(
            step,
            computed=tuple(pick.choice(edges) for _ in step.new),
            new=tuple(pick.choice([*edges, 1]) for _ in step.new),
        )
    return Chunked(step, blocks, pick.choice([0, 1]), pick.choice([None, True, False]))


FAR_CHUNKS = [
    Chunked(MANY, 1),
    Chunked(Requests((300, 2), (1190, 3)), 300, spare=1, flag=True),
    Chunked(LONG, 300),
    Chunked(LONG, 1, flag=False),
    Chunked(Requests((1, 2), (70_000, 65_600), 1), 1),
    Chunked(Requests((2,), (65_599,), 4), 16_400),
]
"""Requests, chunks and lengths of chunks that do not fit 8 and 16 bits."""


@law(
    "make_local_attention_virtual_batches",
    cases=several(chunked()),
    edges=[
        [chunked]
        for chunked in (
            *FAR_CHUNKS,
            Chunked(PROMPT, 3),
        )
    ],
)
def every_chunk_with_new_tokens_is_a_request(
    setting: Setting, cases: list[Chunked]
) -> None:
    """Tokens keep their order; a request without new tokens keeps its last chunk."""
    for case in cases:
        step, device = case.step, setting.device
        table = table_of(step.rows(), device, case.spare)
        whole = whole_step(step, device, REJECTED_BESIDE).replace(
            block_table_tensor=table
        )
        if case.flag is not None:
            whole = whole.replace(causal=case.flag)
        before = remember(whole)
        make = setting.candidate.make_local_attention_virtual_batches
        found = make(case.chunk, whole, step.block_size)
        expect_unchanged("the step", whole, before)
        virtual = case.virtual()
        reqs = [req for req, _, _, _ in virtual]
        new = [query_len for _, _, query_len, _ in virtual]
        lens = [keys for _, _, _, keys in virtual]
        starts = counts([0, *accumulate(new)])
        size, rows = step.block_size, step.rows()
        causal, prefilling = flags_of(step, 1), flags_of(step, 2)
        pieces = [
            rows[req][number * case.blocks : number * case.blocks - (-keys // size)]
            for req, number, _, keys in virtual
        ]
        expect_rows("block_table_tensor", found.block_table_tensor.cpu(), pieces)
        expect_same("its width", found.block_table_tensor.shape[1], case.blocks)
        right: dict[str, Any] = values_of(whole) | dict.fromkeys(LEFT_OUT)
        right |= {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": counts(lens),
            "seq_lens_cpu": counts(lens),
            "num_computed_tokens_cpu": counts(
                [keys - own for own, keys in zip(new, lens, strict=True)]
            ),
            "num_reqs": len(virtual),
            "max_query_len": max(new, default=0),
            "max_seq_len": max(lens, default=0),
            "block_table_tensor": found.block_table_tensor,
            "causal": torch.tensor([causal[req] for req in reqs], dtype=torch.bool)
            if case.flag is None
            else case.flag,
            "is_prefilling": torch.tensor(
                [prefilling[req] for req in reqs], dtype=torch.bool
            ),
        }
        expect_fields("virtual requests", found, right, device)


@law(
    "make_local_attention_virtual_batches",
    cases=several(chunked()),
    edges=[[chunk] for chunk in FAR_CHUNKS],
)
def a_token_of_a_virtual_request_attends_to_its_own_chunk(
    setting: Setting, cases: list[Chunked]
) -> None:
    """Visible keys of each new token: from the start of its chunk to its position."""
    for case in cases:
        step = case.step
        found = setting.candidate.make_local_attention_virtual_batches(
            case.chunk, bare_step(step, setting.device), step.block_size
        )
        for copy in seen_by(found, step.block_size):
            expect_numbers(
                "the visible slots of each token", copy, step.seen(case.chunk)
            )
        expect_same(
            "the slots that are written", found.slot_mapping.tolist(), step.slots()
        )


@dataclass(frozen=True)
class BadChunks:
    """A step that cannot be split into chunks.

    Args:
        chunk, block_size: The arguments of the call.
        what: The reason why it is invalid.
        given: The field of the step that makes it invalid. Empty if there is none.
    """

    chunk: int
    block_size: int
    what: str
    given: str = ""


@law(
    "make_local_attention_virtual_batches",
    cases=[
        BadChunks(6, 4, "chunks that are not whole blocks"),
        BadChunks(2, 4, "chunks smaller than a block"),
        BadChunks(0, 4, "chunks of no token"),
        BadChunks(4, 0, "blocks of no slot"),
        BadChunks(4, 2, "a sequence longer than its row"),
        BadChunks(8, 4, "more new tokens than tokens", "seq_lens_cpu"),
        BadChunks(8, 4, "images", "mm_req_doc_ranges"),
        BadChunks(8, 4, "trees of drafts", "tree_mask"),
    ],
    claim="rejects shapes",
)
def a_step_without_chunks_is_rejected(setting: Setting, invalid: BadChunks) -> None:
    step = Requests((3, 2), (9, 4), seed=1)
    width = max(map(len, step.rows()))
    whole = bare_step(step, setting.device)
    whole = whole.replace(block_table_tensor=whole.block_table_tensor[:, :width])
    if invalid.given == "seq_lens_cpu":
        whole = whole.replace(seq_lens_cpu=counts([12, 1]))
    elif invalid.given:
        full = whole_step(step, setting.device)
        whole = whole.replace(**{invalid.given: getattr(full, invalid.given)})
    expect_rejection(
        invalid.what,
        lambda: setting.candidate.make_local_attention_virtual_batches(
            invalid.chunk, whole, invalid.block_size
        ),
    )
