"""What does each operation do, with all its numbers?

One source of worked examples for the docstrings, the documentation, `pagetwin explain` and the
tests: each is a doctest that both twins must pass, and a story that walks through it. Every
number of a story is an expression which the tests evaluate, so no step can be wrong.
"""

import doctest
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .operations import Implementation
from .specs import KVCacheSpec


@dataclass(frozen=True)
class StoryStep:
    """One step of a story.

    Args:
        text: what happens, in a sentence with its numbers.
        expression: the same as Python; it may use every name of the example.
        value: what the expression shows.
        step: the words of the `# step:` comment this tells of; empty: the function has none.
    """

    text: str
    expression: str
    value: str
    step: str = ""


@dataclass(frozen=True)
class Example:
    """One call of an operation, what it shows, and why.

    Args:
        concept: the file it belongs to.
        operation: what it calls; "forward" for the backend.
        title: what it shows, in a sentence.
        code: the doctest, as it stands in the docstring of the reference.
        story: how the result comes about.
    """

    concept: str
    operation: str
    title: str
    code: str
    story: tuple[StoryStep, ...]

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The doctest as pairs: source text, and what it shows (empty: nothing)."""
        parsed = doctest.DocTestParser().get_examples(self.code)
        return tuple((each.source.rstrip(), each.want.rstrip()) for each in parsed)


def example_names(implementation: Implementation) -> dict[str, Any]:
    """Return the names that examples may use, their operations taken from one twin."""
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "KVCacheSpec": KVCacheSpec,
        "BACKENDS": implementation.modules["backend"].BACKENDS,
    }
    for module in implementation.modules.values():
        for each in EXAMPLES:
            if hasattr(module, each.operation):
                names[each.operation] = getattr(module, each.operation)
    return names


def run_example(
    example: Example, names: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Run an example call by call: source text, what it promises, what it shows here.

    Args:
        example: what to run.
        names: from `example_names`; changed: the example adds its own.
    """
    for source, shows in example.calls:
        try:
            call = compile(source, example.operation, "eval")
        except SyntaxError:
            exec(source, names)
            yield source, shows, ""
            continue
        result = eval(call, names)
        yield source, shows, "" if result is None else repr(result)


def examples_of(concept: str) -> tuple[Example, ...]:
    """Return the examples of a concept, in the order of its operations."""
    return tuple(each for each in EXAMPLES if each.concept == concept)


EXAMPLES = (
    # ---- block_table
    Example(
        "block_table",
        "blocks_needed",
        "Nine tokens in blocks of four need three blocks, the last one almost empty.",
        """\
>>> blocks_needed(num_tokens=9, block_size=4)
3
""",
        (
            StoryStep(
                "Eight tokens fill two blocks of four to the last slot.",
                "9 // 4",
                "2",
            ),
            StoryStep(
                "One token is left over. It needs a whole block, as blocks are never cut.",
                "9 % 4",
                "1",
            ),
            StoryStep(
                "So it is 9 / 4 rounded up; minus signs around // round up, with no float.",
                "-(-9 // 4)",
                "3",
            ),
        ),
    ),
    Example(
        "block_table",
        "make_block_table",
        "Two requests, one with two blocks and one with one, become one table.",
        """\
>>> make_block_table([[7, 2], [5]], max_blocks=3)
tensor([[7, 2, 0],
        [5, 0, 0]], dtype=torch.int32)
""",
        (
            StoryStep(
                "Request 0 owns blocks 7 and 2, in this order: its first tokens lie in block"
                " 7, although 7 is the larger number.",
                "[[7, 2], [5]][0]",
                "[7, 2]",
            ),
            StoryStep(
                "Request 1 owns one block, 5.",
                "[[7, 2], [5]][1]",
                "[5]",
            ),
            StoryStep(
                "The table is 3 wide, so 1 entry is free behind row 0 and 2 behind row 1."
                " They are 0 here, but could be anything, since nobody reads them.",
                "[3 - len(row) for row in [[7, 2], [5]]]",
                "[1, 2]",
            ),
        ),
    ),
    Example(
        "block_table",
        "append_blocks",
        "Request 0 has outgrown its two blocks and gets a third.",
        """\
>>> append_blocks(
...     torch.tensor([[7, 2, 0], [5, 0, 0]], dtype=torch.int32),
...     torch.tensor([2, 1], dtype=torch.int32),
...     [[4], []],
... )
tensor([3, 1], dtype=torch.int32)
""",
        (
            StoryStep(
                "Row 0 holds 2 blocks, so the new block 4 goes to entry 2, right behind"
                " them; the row is then 7, 2, 4.",
                "[7, 2] + [4]",
                "[7, 2, 4]",
            ),
            StoryStep(
                "Request 1 needs nothing; its list is empty and its row stays as it was.",
                "[5] + []",
                "[5]",
            ),
            StoryStep(
                "What comes back is how many blocks each row holds now. The table itself"
                " cannot tell: a 0 in it may be padding or block 0.",
                "[2 + len([4]), 1 + len([])]",
                "[3, 1]",
            ),
        ),
    ),
    # ---- slot_mapping
    Example(
        "slot_mapping",
        "compute_slot_mapping_start_idx",
        "Under a window of 8, the first two tokens of a prompt of 10 are never seen again.",
        """\
>>> compute_slot_mapping_start_idx(
...     is_prompt=True, query_len=6, context_len=4, sliding_window=8
... )
2
""",
        (
            StoryStep(
                "4 tokens lie in the cache and 6 are new: the sequence has 10.",
                "4 + 6",
                "10",
            ),
            StoryStep(
                "The next token will see 8 keys, itself included; of these 10 tokens it sees"
                " at most the last 8, which begin at position 2.",
                "10 - 8",
                "2",
            ),
            StoryStep(
                "A sequence shorter than its window would give a negative number; its first"
                " position is then 0.",
                "max(0, 5 - 8)",
                "0",
            ),
        ),
    ),
    Example(
        "slot_mapping",
        "compute_slot_mapping",
        "Seven new tokens of one sequence; the first one needs no slot.",
        """\
>>> compute_slot_mapping(
...     is_profile_run=False,
...     seq_len=10,
...     context_len=3,
...     start_idx=4,
...     block_size=4,
...     block_table=[7, 2, 5],
... )
tensor([-1,  8,  9, 10, 11, 20, 21])
""",
        (
            StoryStep(
                "3 of 10 tokens are in the cache, so positions 3 to 9 are new. Position 3 lies"
                " before start_idx = 4: it is not stored, and its slot is -1.",
                "list(range(3, 10))",
                "[3, 4, 5, 6, 7, 8, 9]",
            ),
            StoryStep(
                "Position 5 belongs to entry 5 // 4 = 1 of the row 7, 2, 5: block 2.",
                "[7, 2, 5][5 // 4]",
                "2",
                step="look the block up",
            ),
            StoryStep(
                "Block 2 starts at slot 2 * 4 = 8, and position 5 is number 5 % 4 = 1 in it:"
                " slot 9.",
                "2 * 4 + 5 % 4",
                "9",
                step="count slots into it",
            ),
            StoryStep(
                "Positions 4 to 7 fill block 2, slots 8 to 11. Position 8 begins the next"
                " entry, block 5, whose first slot is 20: addresses jump where blocks do.",
                "[5 * 4 + position % 4 for position in (8, 9)]",
                "[20, 21]",
            ),
        ),
    ),
    Example(
        "slot_mapping",
        "compute_slot_mapping_batch",
        "One request brings its fifth token, another starts with three.",
        """\
>>> compute_slot_mapping_batch(
...     query_lens=[1, 3],
...     num_computed_tokens=[4, 0],
...     block_rows=[[7, 2], [5]],
...     block_size=4,
... )
tensor([ 8, 20, 21, 22])
""",
        (
            StoryStep(
                "Request 0 has 4 tokens in the cache, so its new one has position 4: entry 1"
                " of its row, block 2, first slot.",
                "[7, 2][4 // 4] * 4 + 4 % 4",
                "8",
            ),
            StoryStep(
                "Request 1 has none; its new positions are 0, 1 and 2, all in block 5.",
                "[5 * 4 + position for position in (0, 1, 2)]",
                "[20, 21, 22]",
            ),
            StoryStep(
                "Request after request, the slots of a batch make one flat list.",
                "[8] + [20, 21, 22]",
                "[8, 20, 21, 22]",
            ),
        ),
    ),
    Example(
        "slot_mapping",
        "compute_slot_mapping_device",
        "The same batch, from tensors, padded to five tokens.",
        """\
>>> compute_slot_mapping_device(
...     query_start_loc=torch.tensor([0, 1, 4], dtype=torch.int32),
...     num_computed_tokens=torch.tensor([4, 0], dtype=torch.int32),
...     block_table=torch.tensor([[7, 2], [5, 0]], dtype=torch.int32),
...     block_size=4,
...     num_tokens=5,
... )
tensor([ 8, 20, 21, 22, -1])
""",
        (
            StoryStep(
                "The starts 0, 1, 4 say that token 0 belongs to request 0 and tokens 1 to 3 to"
                " request 1: one new token and three.",
                "[1 - 0, 4 - 1]",
                "[1, 3]",
            ),
            StoryStep(
                "Token 2 is the second new token of request 1, so its position is 0 + 2 - 1 ="
                " 1, its block the first of row 1, its slot 21.",
                "[5, 0][1 // 4] * 4 + 1 % 4",
                "21",
            ),
            StoryStep(
                "A captured CUDA graph always runs the same number of tokens, here 5. The one"
                " that no request owns is not stored.",
                "5 - 4",
                "1",
            ),
        ),
    ),
    # ---- kv_cache
    Example(
        "kv_cache",
        "get_kv_cache_shape",
        "Ten blocks of 16 tokens, for 8 heads of 64 elements.",
        """\
>>> get_kv_cache_shape(
...     num_blocks=10, block_size=16, num_kv_heads=8, head_size=64
... )
(2, 10, 16, 8, 64)
""",
        (
            StoryStep(
                "Keys and values are the first axis, so each half is one contiguous tensor.",
                "get_kv_cache_shape(10, 16, 8, 64)[0]",
                "2",
            ),
            StoryStep(
                "Block and slot come next: such a cache holds 160 tokens.",
                "10 * 16",
                "160",
            ),
            StoryStep(
                "A slot holds one token's key: 8 heads of 64 elements, side by side.",
                "8 * 64",
                "512",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "allocate_kv_cache",
        "Ten pages in float16 are 327,680 bytes.",
        """\
>>> spec = KVCacheSpec(16, 8, 64, torch.float16)
>>> allocate_kv_cache(spec, num_blocks=10).shape
torch.Size([327680])
""",
        (
            StoryStep(
                "A page is what one block takes: keys and values of 16 tokens, 8 heads, 64"
                " elements.",
                "2 * 16 * 8 * 64",
                "16384",
            ),
            StoryStep(
                "A float16 element has 2 bytes.",
                "16384 * 2",
                "32768",
            ),
            StoryStep("Ten pages are taken at once.", "10 * 32768", "327680"),
        ),
    ),
    Example(
        "kv_cache",
        "reshape_kv_cache",
        "The same bytes, seen as ten blocks.",
        """\
>>> raw = torch.zeros(327680, dtype=torch.int8)
>>> reshape_kv_cache(raw, KVCacheSpec(16, 8, 64, torch.float16)).shape
torch.Size([2, 10, 16, 8, 64])
""",
        (
            StoryStep(
                "The bytes make ten pages, and none is left over.",
                "divmod(327680, 32768)",
                "(10, 0)",
                step="count the pages",
            ),
            StoryStep(
                "Two bytes make a float16 element.",
                "raw.view(torch.float16).numel()",
                "163840",
                step="look at the bytes as elements",
            ),
            StoryStep(
                "The five axes multiply to exactly these elements. The view lies on the same"
                " memory: nothing was copied.",
                "2 * 10 * 16 * 8 * 64",
                "163840",
                step="cut them into the five axes",
            ),
        ),
    ),
    Example(
        "kv_cache",
        "split_kv_cache",
        "One cache, two views: its keys and its values.",
        """\
>>> key_cache, value_cache = split_kv_cache(torch.zeros(2, 10, 16, 8, 64))
>>> key_cache.shape
torch.Size([10, 16, 8, 64])
""",
        (
            StoryStep(
                "Entry 0 of the first axis is the keys, entry 1 the values; both have the four"
                " axes that remain.",
                "value_cache.shape == key_cache.shape",
                "True",
            ),
            StoryStep(
                "The values begin where the keys end, in the same memory: 81,920 elements"
                " further on.",
                "value_cache.storage_offset() - key_cache.storage_offset()",
                "81920",
            ),
        ),
    ),
    # ---- cache_ops
    Example(
        "cache_ops",
        "reshape_and_cache",
        "Token 0 goes to slot 9, token 1 nowhere.",
        """\
>>> key_cache = torch.zeros(3, 4, 1, 1)
>>> key = torch.tensor([[[5.0]], [[6.0]]])
>>> slot_mapping = torch.tensor([9, -1])
>>> reshape_and_cache(key, key, key_cache, key_cache.clone(), slot_mapping)
>>> key_cache.flatten()
tensor([0., 0., 0., 0., 0., 0., 0., 0., 0., 5., 0., 0.])
""",
        (
            StoryStep(
                "The slots are 9 and -1. Token 1 has a negative one: it is not stored, and the"
                " 6 appears nowhere.",
                "[slot < 0 for slot in (9, -1)]",
                "[False, True]",
                step="skip tokens without a slot",
            ),
            StoryStep(
                "Blocks have 4 slots, so slot 9 is offset 1 of block 2.",
                "divmod(9, 4)",
                "(2, 1)",
                step="find block and offset",
            ),
            StoryStep(
                "Token 0's key, 5, is stored there; counted through, that is place 9 of the"
                " 12.",
                "float(key_cache[2, 1])",
                "5.0",
                step="store the key and the value",
            ),
        ),
    ),
    Example(
        "cache_ops",
        "gather_cache",
        "A sequence of six tokens, read back from blocks 2 and 0.",
        """\
>>> key_cache = torch.arange(12.0).view(3, 4, 1, 1)
>>> key, value = gather_cache(
...     key_cache,
...     key_cache,
...     block_table=torch.tensor([[2, 0]], dtype=torch.int32),
...     seq_start_loc=torch.tensor([0, 6], dtype=torch.int32),
...     num_tokens=6,
... )
>>> key.flatten()
tensor([ 8.,  9., 10., 11.,  0.,  1.])
""",
        (
            StoryStep(
                "Positions 0 to 3 belong to entry 0 of the row, block 2; positions 4 and 5 to"
                " entry 1, block 0.",
                "[[2, 0][position // 4] for position in range(6)]",
                "[2, 2, 2, 2, 0, 0]",
                step="look the block up",
            ),
            StoryStep(
                "Within their block they are numbers 0 to 3, then 0 and 1.",
                "[position % 4 for position in range(6)]",
                "[0, 1, 2, 3, 0, 1]",
                step="count slots into it",
            ),
            StoryStep(
                "In this cache every slot holds its own number, so the keys tell where they"
                " came from: slots 8 to 11, then 0 and 1.",
                "[2 * 4, 2 * 4 + 3, 0 * 4, 0 * 4 + 1]",
                "[8, 11, 0, 1]",
                step="copy the key and the value",
            ),
        ),
    ),
    Example(
        "cache_ops",
        "copy_blocks",
        "Block 2 is copied over block 0, keys and values.",
        """\
>>> kv_cache = torch.arange(6.0).view(2, 3, 1, 1, 1)
>>> copy_blocks([kv_cache], torch.tensor([[2, 0]]))
>>> kv_cache.flatten()
tensor([2., 1., 2., 5., 4., 5.])
""",
        (
            StoryStep(
                "Three blocks of one slot: their keys are 0, 1, 2, their values 3, 4, 5.",
                "torch.arange(6.0).view(2, 3).tolist()",
                "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]",
            ),
            StoryStep(
                "The pair (2, 0) reads block 2: key 2, value 5.",
                "kv_cache[:, 2].flatten().tolist()",
                "[2.0, 5.0]",
            ),
            StoryStep(
                "Block 0 holds the same now. Two sequences that shared block 2 may go on in"
                " one each.",
                "kv_cache[:, 0].flatten().tolist()",
                "[2.0, 5.0]",
            ),
        ),
    ),
    Example(
        "cache_ops",
        "swap_blocks",
        "Block 2 of one cache moves to block 0 of another.",
        """\
>>> on_device = torch.arange(6.0).view(2, 3, 1, 1, 1)
>>> on_host = torch.zeros(2, 2, 1, 1, 1)
>>> swap_blocks(on_device, on_host, torch.tensor([[2, 0]]))
>>> on_host.flatten()
tensor([2., 0., 5., 0.])
""",
        (
            StoryStep(
                "The source has three blocks, keys 0, 1, 2 and values 3, 4, 5; the host has"
                " room for two.",
                "list(on_host.shape[:2])",
                "[2, 2]",
            ),
            StoryStep(
                "The pair (2, 0) brings key 2 and value 5 to block 0 of the host; its block 1"
                " stays zero.",
                "on_host[:, 0].flatten().tolist()",
                "[2.0, 5.0]",
            ),
            StoryStep(
                "When there is memory again, the pair turned round brings them back.",
                "[2, 0][::-1]",
                "[0, 2]",
            ),
        ),
    ),
    # ---- batch_split
    Example(
        "batch_split",
        "reorder_batch_to_split_decodes_and_prefills",
        "One swap brings both decodes to the front.",
        """\
>>> reorder_batch_to_split_decodes_and_prefills([6, 1, 7, 1])
[3, 1, 2, 0]
""",
        (
            StoryStep(
                "Requests 1 and 3 bring one token each: two decodes, so the boundary lies"
                " before place 2.",
                "[count <= 1 for count in [6, 1, 7, 1]]",
                "[False, True, False, True]",
                step="count the decodes",
            ),
            StoryStep(
                "Of places 0 and 1, place 0 holds a prefill (6 tokens).",
                "[place for place in (0, 1) if [6, 1, 7, 1][place] > 1]",
                "[0]",
                step="find the prefills before the boundary",
            ),
            StoryStep(
                "Of places 2 and 3, place 3 holds a decode.",
                "[place for place in (3, 2) if [6, 1, 7, 1][place] <= 1]",
                "[3]",
                step="find the decodes behind it, the last one first",
            ),
            StoryStep(
                "They change places; requests 1 and 2 stand well and do not move.",
                "[[6, 1, 7, 1][request] for request in [3, 1, 2, 0]]",
                "[1, 1, 7, 6]",
                step="swap them pair by pair",
            ),
        ),
    ),
    Example(
        "batch_split",
        "split_decodes_and_prefills",
        "Two decodes, then two prefills with ten tokens together.",
        """\
>>> split_decodes_and_prefills(build_common_attn_metadata(
...     query_lens=[1, 1, 7, 3],
...     num_computed_tokens=[5, 5, 5, 5],
...     block_rows=[[1], [2], [3], [4]],
...     block_size=16,
... ))
(2, 2, 2, 10)
""",
        (
            StoryStep(
                "The first request with more than one new token is number 2, which brings 7."
                " Two decodes stand before it.",
                "[count > 1 for count in [1, 1, 7, 3]].index(True)",
                "2",
                step="find the first request that is no decode",
            ),
            StoryStep(
                "The two decodes bring 2 tokens, the two prefills the other 10: tokens 0 and 1"
                " of the flat batch, and tokens 2 to 11.",
                "(1 + 1, 7 + 3)",
                "(2, 10)",
                step="count the tokens on both sides",
            ),
        ),
    ),
    # ---- metadata
    Example(
        "metadata",
        "build_common_attn_metadata",
        "Request 0 decodes its fifth token; request 1 starts with three.",
        """\
>>> step = build_common_attn_metadata(
...     query_lens=[1, 3],
...     num_computed_tokens=[4, 0],
...     block_rows=[[7, 2], [5]],
...     block_size=4,
... )
>>> step.query_start_loc, step.seq_lens
(tensor([0, 1, 4], dtype=torch.int32), tensor([5, 3], dtype=torch.int32))
>>> step.slot_mapping
tensor([ 8, 20, 21, 22])
""",
        (
            StoryStep(
                "Request 0 writes position 4 to block 2, slot 8; request 1 writes positions 0"
                " to 2 to block 5, slots 20 to 22.",
                "[2 * 4, 5 * 4, 5 * 4 + 1, 5 * 4 + 2]",
                "[8, 20, 21, 22]",
                step="find the slots of the new tokens",
            ),
            StoryStep(
                "The rows have 2 and 1 entries, so the table is 2 wide; the 0 behind row 1"
                " means nothing.",
                "step.block_table_tensor.tolist()",
                "[[7, 2], [5, 0]]",
                step="pad the rows into one table",
            ),
            StoryStep(
                "Request 0 starts at token 0, request 1 at token 1, and the batch ends at 4.",
                "[0, 0 + 1, 1 + 3]",
                "[0, 1, 4]",
                step="add up where each request starts",
            ),
            StoryStep(
                "After this step the sequences have 4 + 1 and 0 + 3 tokens.",
                "[4 + 1, 0 + 3]",
                "[5, 3]",
                step="add up how long each sequence is",
            ),
            StoryStep(
                "Attention reads these on the device. The host keeps its own copy of starts"
                " and lengths, so that planning never waits for the device.",
                "step.query_start_loc_cpu.tolist()",
                "[0, 1, 4]",
                step="send everything to the device",
            ),
        ),
    ),
    # ---- paged_attention
    Example(
        "paged_attention",
        "paged_attention",
        "Token 0 sees its own value, token 1 the mean of both.",
        """\
>>> paged_attention(
...     query=torch.ones(2, 1, 1),
...     key_cache=torch.ones(3, 2, 1, 1),
...     value_cache=torch.arange(6.0).view(3, 2, 1, 1),
...     block_table=torch.tensor([[2]], dtype=torch.int32),
...     query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
...     seq_lens=torch.tensor([2], dtype=torch.int32),
...     max_query_len=2,
...     max_seq_len=2,
... ).flatten()
tensor([4.0000, 4.5000])
""",
        (
            StoryStep(
                "The sequence has 2 tokens, and its row says block 2. The values there are 4"
                " and 5; the keys are all 1.",
                "torch.arange(6.0).view(3, 2)[2].tolist()",
                "[4.0, 5.0]",
                step="gather the sequence's keys and values",
            ),
            StoryStep(
                "Query times key times scale: 1 * 1 * 1 / sqrt(1) = 1, for every pair.",
                "1.0 * 1.0 * 1**-0.5",
                "1.0",
                step="compare each query with every key",
            ),
            StoryStep(
                "Token 0 stands at position 0, so position 1 is hidden from it. Token 1 sees"
                " both.",
                "[[key <= query for key in (0, 1)] for query in (0, 1)]",
                "[[True, False], [True, True]]",
                step="hide the keys behind each query",
            ),
            StoryStep(
                "Token 0 has one score: weight 1. Token 1 has two equal ones; the logarithm of"
                " their summed exponentials is 1.6931, and exp(1 - 1.6931) = 0.5.",
                "(round(math.log(2 * math.e), 4), round(math.exp(1 - 1.6931), 2))",
                "(1.6931, 0.5)",
                step="turn scores into weights",
            ),
            StoryStep(
                "Token 0 gets 1 * 4, token 1 gets 0.5 * 4 + 0.5 * 5.",
                "(1 * 4.0, 0.5 * 4 + 0.5 * 5)",
                "(4.0, 4.5)",
                step="average the values by them",
            ),
        ),
    ),
    # ---- backend
    Example(
        "backend",
        "forward",
        "One layer, one step: a decode and a prefill through the same cache.",
        """\
>>> spec = KVCacheSpec(
...     block_size=2, num_kv_heads=1, head_size=1, dtype=torch.float32
... )
>>> kv_cache = reshape_kv_cache(allocate_kv_cache(spec, num_blocks=4), spec)
>>> kv_cache[1, 3] = torch.tensor([10.0, 20.0]).view(2, 1, 1)
>>> step = build_common_attn_metadata(
...     query_lens=[1, 2],
...     num_computed_tokens=[2, 0],
...     block_rows=[[3, 1], [2]],
...     block_size=2,
... )
>>> backend = BACKENDS[0]
>>> builder = backend.get_builder_cls()(spec, ["layer 0"], "cpu")
>>> metadata = builder.build(common_prefix_len=0, common_attn_metadata=step)
>>> layer = backend.get_impl_cls()(num_heads=1, head_size=1, scale=1.0)
>>> layer.forward(
...     layer=None,
...     query=torch.ones(3, 1, 1),
...     key=torch.zeros(3, 1, 1),
...     value=torch.tensor([30.0, 4.0, 7.0]).view(3, 1, 1),
...     kv_cache=kv_cache,
...     attn_metadata=metadata,
...     output=torch.zeros(3, 1, 1),
... ).flatten()
tensor([20.0000,  4.0000,  5.5000])
""",
        (
            StoryStep(
                "Request 0 wrote values 10 and 20 to block 3 in earlier steps. It brings one"
                " token, a decode; request 1 brings two, a prefill. All keys are 0, so all"
                " weights are equal and attention is a plain mean.",
                "(metadata.num_decodes, metadata.num_prefills)",
                "(1, 1)",
            ),
            StoryStep(
                "The new values 30, 4 and 7 go to slots 2, 4 and 5: 2 is the start of block"
                " 1, and block 2 is 4 and 5.",
                "kv_cache[1].flatten().tolist()",
                "[0.0, 0.0, 30.0, 0.0, 4.0, 7.0, 10.0, 20.0]",
                step="write the new keys and values",
            ),
            StoryStep(
                "The decode sees its whole sequence, blocks 3 and 1. The prefill's tokens see"
                " 4, then 4 and 7.",
                "[(10 + 20 + 30) / 3, 4 / 1, (4 + 7) / 2]",
                "[20.0, 4.0, 5.5]",
                step="attend for the decodes, then for the prefills",
            ),
        ),
    ),
)
