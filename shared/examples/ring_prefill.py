"""The worked examples and the picture of ring_prefill."""

from rich.text import Text

from .drawing import A, B, boxes, said, under
from .story import Example, StoryStep


def draw() -> list[Text]:
    """Return the concept's picture for the terminal."""
    owners = [0, 1, 1, 0]
    cells = [(f"c{chunk}", B if rank else A) for chunk, rank in enumerate(owners)]
    return [
        *said("A prompt in four chunks. Under them the rank of each chunk:", ""),
        *boxes(cells),
        under([str(rank) for rank in owners]),
        *said(
            "",
            "round 0   rank 0: c0 to c0, c3 to c0 c3      rank 1: c1 to c1, c2 to c1 c2",
            "round 1   rank 0: c3 to c1 c2                rank 1: c1 to c0, c2 to c0",
            "",
            "The ranks exchange their shares during round 0.",
        ),
    ]


EXAMPLES = (
    Example(
        "RingContextParallel",
        "Both chunks of a prompt of three tokens on one rank, in one round.",
        (
            StoryStep(
                "Chunk 0 is token 0, chunk 1 is tokens 1 and 2. They attend to 1 and to 3 keys.",
                "[3 * index // 2 for index in (1, 2)]",
                "[1, 3]",
                step="cut each prompt into two chunks per rank, and list the keys of each round",
            ),
            StoryStep(
                "Three keys need two blocks of two slots.",
                "share.slots.tolist(), share.num_blocks",
                "([0, 1, 2], 2)",
                step="put this rank's keys and values into blocks",
            ),
            StoryStep(
                "There is one round per rank, so here nothing is sent.",
                "len(share.rounds) - 1",
                "0",
                step="start to send the held share to the next rank",
            ),
            StoryStep(
                "All keys are equal: each token gets the mean of the values up to its own.",
                "[3 / 1, (3 + 5) / 2, (3 + 5 + 7) / 3]",
                "[3.0, 4.0, 5.0]",
                step="attend to the keys of the held share that precede each chunk",
            ),
            StoryStep(
                "The first round has all of the weight, because nothing comes before it.",
                "math.exp(-math.inf)",
                "0.0",
                step="merge them with the results of the rounds before",
            ),
            StoryStep(
                "After the last round no share arrives.",
                "share.rounds[0] is share.rounds[-1]",
                "True",
                step="wait for the share of the previous rank",
            ),
            StoryStep(
                "The call has no sinks, so this step changes nothing.",
                "0",
                "0",
                step="count the sinks once, after all keys",
            ),
        ),
    ),
)
