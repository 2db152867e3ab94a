"""A serving engine in fifty lines: the loop around scheduler, metadata, cache and attention.

`PagedEngine` serves any model with the attributes of `ToyModel`. The model is not part of paged
attention: in each layer it hands its queries, keys and values to a function, and gets attention.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from types import ModuleType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..contract.scheduler_classes import Request, ScheduledRequest, SchedulerOutput

# begin: types
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: its number, queries, keys and values, each [tokens, heads, head_size]."""


class Model(Protocol):
    """What the engine needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    device: str
    dtype: torch.dtype

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return logits [tokens, vocabulary] of a flat batch of tokens."""


class Sizes(NamedTuple):
    """Sizes of an engine.

    Args:
        num_blocks, block_size: Blocks of a layer's cache, and slots of a block.
        token_budget: New tokens of a step at most.
        max_running: Running requests at most.
    """

    num_blocks: int
    block_size: int
    token_budget: int
    max_running: int = 8


def new_positions(part: ScheduledRequest) -> range:
    """Return the positions of the tokens that a request computes in a step."""
    first = part.num_computed_tokens
    return range(first, first + part.num_scheduled_tokens)


# end: types


class PagedEngine:
    """Serves requests: each step computes one flat batch of new tokens of all running ones.

    Args:
        model: The model.
        twin: `pagetwin.reference` or `pagetwin.optimized`.
        sizes: Sizes of the cache and of a step.
    """

    # begin: engine
    def __init__(self, model: Model, twin: ModuleType, sizes: Sizes) -> None:
        self.model, self.twin, self.block_size = model, twin, sizes.block_size
        blocks = twin.BlockManager(sizes.num_blocks, sizes.block_size)
        self.scheduler = twin.Scheduler(blocks, sizes.token_budget, sizes.max_running)
        slots, heads = sizes[:2], (model.num_kv_heads, model.head_size)
        shape = model.num_layers, 2, *slots, *heads
        self.caches = torch.zeros(shape, dtype=model.dtype, device=model.device)

    def generate(self, requests: Iterable[Request]) -> Iterator[SchedulerOutput]:
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.num_unfinished_requests:
            yield self.step()

    def step(self) -> SchedulerOutput:
        device = self.model.device
        # step: decide which requests compute how many tokens, and allocate their blocks
        output: SchedulerOutput = self.scheduler.schedule()
        parts = output.scheduled_requests
        # step: describe the batch: starts, lengths, block table and slots
        batch = self.twin.build_common_attn_metadata(
            [part.num_scheduled_tokens for part in parts],
            [part.num_computed_tokens for part in parts],
            [part.block_ids for part in parts],
            self.block_size,
            device,
        )
        arguments = batch.block_table_tensor, batch.query_start_loc, batch.seq_lens
        bounds = batch.max_query_len, batch.max_seq_len

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # step: in each layer, store the new keys and values, then attend to all of them
            caches = self.caches[layer].unbind()
            self.twin.reshape_and_cache(key, value, *caches, batch.slot_mapping)
            found: Tensor = self.twin.paged_attention(
                query, *caches, *arguments, *bounds
            )
            return found

        # step: run the model once, on the new tokens of all requests
        places = [(part, place) for part in parts for place in new_positions(part)]
        tokens = [part.request.token_ids[place] for part, place in places]
        positions = [place for _, place in places]
        numbers, at = torch.tensor([tokens, positions], device=device)
        logits = self.model(numbers, at, attend)
        # step: choose the next token of each request whose last known token was computed
        last = batch.query_start_loc[1:].long() - 1
        best = zip(parts, logits[last].argmax(-1).tolist(), strict=True)
        chosen = {p.request.request_id: token for p, token in best if p.samples_token}
        self.scheduler.update_from_output(output, chosen)
        return output

    # end: engine


class ToyModel(nn.Module):
    """Two layers of attention over token and position embeddings, with random weights."""

    # begin: model
    num_layers, num_heads, num_kv_heads, head_size = 2, 4, 2, 16
    device, dtype = "cpu", torch.float32

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        vocabulary, max_len = 50, 64
        torch.manual_seed(0)
        width = self.num_heads * self.head_size
        kv_width = self.num_kv_heads * self.head_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(max_len, width)
        self.qkv = nn.ModuleList(
            nn.Linear(width, width + 2 * kv_width) for _ in range(self.num_layers)
        )
        self.head = nn.Linear(width, vocabulary)
        self.to(dtype)
        self.dtype = dtype

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(positions)
        for layer, projection in enumerate(self.qkv):
            heads = projection(hidden).unflatten(-1, (-1, self.head_size))
            sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
            query, key, value = heads.split(sizes, dim=1)
            hidden = hidden + attend(layer, query, key, value).flatten(1)
        logits: Tensor = self.head(hidden)
        return logits

    # end: model


def describe(
    number: int, output: SchedulerOutput, in_cache: dict[Hashable, int]
) -> str:
    """Return a step in one line: what each request computes, and what happened to blocks.

    Args:
        number: The number of the step.
        output: What the scheduler decided.
        in_cache: Tokens of each request that are in the cache. Modified in place.
    """
    words = []
    for name in output.preempted_req_ids:
        in_cache[name] = 0
    for part in output.scheduled_requests:
        name, new = part.request.request_id, part.num_scheduled_tokens
        found = part.num_computed_tokens - in_cache.get(name, 0)
        in_cache[name] = part.num_computed_tokens + new
        if part.num_recomputed_tokens:
            again = part.num_recomputed_tokens
            words.append(f"{name} recompute {again}, new {new - again}")
        elif part.num_computed_tokens < part.request.num_prompt_tokens:
            words.append(f"{name} prefill {new}")
        else:
            words.append(f"{name} decode {new}")
        if found:
            words[-1] += f" ({found} found in the cache)"
    if output.preempted_req_ids:
        words.append(f"{', '.join(map(str, output.preempted_req_ids))} preempted")
    return f"step {number:2}  {'; '.join(words)}"


# begin: prompts
PROMPTS = {
    "a": (3, 1, 4, 1, 5, 9, 2, 6, 5),
    "b": (3, 1, 4, 1, 5, 9, 2, 7),
    "c": (8, 2, 8, 1),
}
"""Prompts of the example. The second begins like the first."""
SIZES = Sizes(num_blocks=8, block_size=4, token_budget=8)
MAX_TOKENS = 8
# end: prompts


def run_example(twin: ModuleType) -> Iterator[str]:
    """Serve the prompts with the toy model, and yield each step, then the tokens."""
    requests = [Request(name, prompt, MAX_TOKENS) for name, prompt in PROMPTS.items()]
    engine = PagedEngine(ToyModel(), twin, SIZES)
    in_cache: dict[Hashable, int] = {}
    for number, output in enumerate(engine.generate(requests)):
        yield describe(number, output, in_cache)
    for request in requests:
        yield f"{request.request_id}  {request.output_token_ids}"
