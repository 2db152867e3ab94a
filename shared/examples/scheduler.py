"""The worked example and the picture of scheduler."""

from rich.text import Text

from .drawing import DIM, NEW, A, B, beside, boxes, said
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""

    def step(title: str, *cells: tuple[str, str]) -> list[Text]:
        return [Text(title, style=DIM), *boxes(cells, width=3)]

    a, b, empty = ("a", A), ("b", B), ("", DIM)
    return [
        *said("A step computes at most 4 new tokens; the cache has 4 blocks of 2:", ""),
        *beside(
            step("step 1", a, a, a, b),
            step("step 2", a, b, b, b),
            step("step 3", a, empty, empty, empty),
            step("step 4", ("b", NEW), ("b", NEW), ("b", NEW), empty),
        ),
        *said(
            "", "In step 3 b is preempted. In step 4 it finds 2 tokens in the cache."
        ),
    ]


EXAMPLES = (
    Example(
        "Scheduler",
        "Two requests share a budget of 4 tokens and a cache of 8 slots.",
        (
            StoryStep(
                "In step 2 request a is running and decodes one token. Request b has computed 1"
                " of its 4 prompt tokens and gets the rest of the budget.",
                "min(4 - 1, 4 - 1)",
                "3",
                step="schedule the running requests, the one admitted first before all others",
            ),
            StoryStep(
                "In step 1 nothing is running. Request a takes 3 tokens of the budget, and 1 is"
                " left for b.",
                "4 - 3",
                "1",
                step="admit waiting requests, unless blocks ran out in this step",
            ),
            StoryStep(
                "In step 4 request b has 5 known tokens: its prompt and one output token. The"
                " block of its tokens 5, 6 is still cached, so 2 tokens are not computed again.",
                "second.scheduled_requests[1].request.token_ids",
                "[5, 6, 8, 9, 1]",
                step="look up the first tokens of the next request in the prefix cache",
            ),
            StoryStep(
                "So 5 - 2 tokens are computed, which the budget of 4 allows. They end the known"
                " tokens, so the next token can be sampled.",
                "min(5 - 2, 4)",
                "3",
                step="schedule a chunk that fits the budget, or wait for blocks",
            ),
            StoryStep(
                "Step 1 computes all 3 tokens of request a, of which 2 fill a block. It computes"
                " 1 of the 4 prompt tokens of b, so b samples no token.",
                "[row.samples_token for row in first.scheduled_requests]",
                "[True, False]",
                step="count the tokens, and make their full blocks known to others",
            ),
            StoryStep(
                "Request a is finished after step 3, with 3 output tokens.",
                "third.scheduled_requests[0].request.output_token_ids",
                "[4, 4, 4]",
                step="append the sampled token; a finished request frees its blocks",
            ),
            StoryStep(
                "In step 3 request a stores its fifth token and needs a third block. Both"
                " requests hold 2 blocks, so none of the 4 is left, and b loses its blocks.",
                "-(-5 // 2) + -(-4 // 2) > 4",
                "True",
                step="preempt the request that was admitted last; it is admitted again first",
            ),
        ),
    ),
)
