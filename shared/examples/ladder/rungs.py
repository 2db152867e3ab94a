"""The rungs of the ladder, in order.

A rung is a file of this folder and the settings it is prepared with; some files make two rungs. A
variant that was tried on a rung has its number: it differs from that rung by what its title says.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor

from .batches import LadderBatch


@dataclass(frozen=True)
class Rung:
    """One kernel with its settings.

    Args:
        kind: "decode" or "prefill".
        number: its position on the ladder, or that of the rung on which it was tried.
        title: what it changes.
        file: the module that holds it: a file of this folder, or the name of another module.
        settings: further arguments of its `prepare`, after a batch and an output.
        tried: whether it is a variant that is not on the ladder.
    """

    kind: str
    number: int
    title: str
    file: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    tried: bool = False

    @property
    def name(self) -> str:
        """Its name in the record."""
        return f"{self.kind} {self.number}{', tried' * self.tried}: {self.title}"

    def prepare(self, batch: LadderBatch, out: Tensor) -> Callable[[], Any]:
        """Return what launches it. Everything but the batch is made here."""
        name = self.file if "." in self.file else f".{self.file}"
        module = import_module(name, __package__)
        launch: Callable[[], Any] = module.prepare(batch, out, **self.settings)
        return launch


def _tried(kind: str, number: int, title: str, file: str, **settings: Any) -> Rung:
    return Rung(kind, number, title, file, settings, tried=True)


RUNGS = (
    Rung("decode", 1, "one program a query head, block by block", "decode_1_blocks"),
    Rung("decode", 2, "tiles of 64 keys", "decode_2_wide_tiles"),
    Rung("decode", 3, "the heads of a group as one tile", "decode_3_tensor_cores"),
    Rung("decode", 4, "equal splits, combined in a second launch", "decode_4_splits"),
    Rung("decode", 5, "the next tile in flight", "decode_4_splits", {"num_stages": 3}),
    Rung("decode", 6, "balanced segments, combined in one launch", "decode_6_balanced"),
    Rung("decode", 7, "masks on the last tile, powers of two", "decode_7_edges"),
    Rung("decode", 8, "the kernel that ships", "shipped"),
    _tried("decode", 5, "4 stages", "decode_4_splits", num_stages=4),
    _tried("decode", 5, "5 stages", "decode_4_splits", num_stages=5),
    _tried("decode", 6, "segments a power of two", "decode_6_balanced", even=True),
    _tried(
        "decode",
        6,
        "one program an SM, 5 stages",
        "decode_6_balanced",
        programs=1,
        num_stages=5,
    ),
    _tried(
        "decode",
        6,
        "one program an SM, 64 keys, 13 stages",
        "decode_6_balanced",
        programs=1,
        keys=64,
        num_stages=13,
    ),
    _tried("decode", 6, "8 warps", "decode_6_balanced", num_warps=8),
    _tried(
        "decode", 6, "32 keys, 13 stages", "decode_6_balanced", keys=32, num_stages=13
    ),
    _tried("decode", 6, "one flattened loop", "decode_flattened"),
    Rung("prefill", 1, "one program a token and head", "prefill_1_tokens"),
    Rung("prefill", 2, "tiles of 16 tokens", "prefill_2_tiles"),
    Rung("prefill", 3, "tiles of 64 tokens", "prefill_2_tiles", {"rows": 64}),
    Rung("prefill", 4, "128 tokens, masks at the diagonal", "prefill_4_diagonal"),
    Rung(
        "prefill",
        5,
        "the longest tiles first",
        "prefill_4_diagonal",
        {"longest_first": True},
    ),
    Rung("prefill", 6, "programs that stay", "prefill_6_persistent"),
    Rung("prefill", 7, "the kernel that ships", "shipped"),
    _tried(
        "prefill",
        5,
        "128 keys, 8 warps",
        "prefill_4_diagonal",
        keys=128,
        num_warps=8,
        longest_first=True,
    ),
    _tried("prefill", 5, "blocks looked up once", "prefill_tried", by_block=True),
    _tried("prefill", 5, "4 heads in a tile", "prefill_tried", heads=4),
)
