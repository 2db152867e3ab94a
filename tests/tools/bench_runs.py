"""Runs of the benchmark on the host: the command, small workloads, settings, and baselines."""

from typing import Any

import torch
from pagetwin.tools.bench import choose_settings, load_workloads
from pagetwin.tools.bench.ceilings import Ceilings
from pagetwin.tools.bench.libraries.library import AttentionLibrary, Declined, Prepared
from pagetwin.tools.bench.settings import BenchSettings
from pagetwin.tools.bench.workloads import Workload
from pagetwin.tools.cli import app
from typer.testing import CliRunner

CEILINGS = Ceilings(4000.0, 3900.0, 3800.0, 800.0, 4.0)
NAMES = [
    "decode-64x4k",
    "decode-256-ragged",
    "decode-8x32k",
    "decode-1x128k",
    "decode-16x512",
    "decode-64x4k-mha",
    "decode-64x4k-fp8",
    "decode-64x4k-swa",
    "verify-64x4k-q4",
    "cross-64x1500",
    "prefill-1x8k",
    "prefill-8x2k",
    "prefill-1x8k-d64",
    "chunk-2k-on-30k",
    "mixed-128x4k+2k",
    "encoder-32x1500",
    "write-8k",
]


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["bench", *(str(word) for word in words)])


def small(name: str) -> Workload:
    return load_workloads("all")[name].tiny()


def settings_of(*names: str, **others: Any) -> BenchSettings:
    return choose_settings(names, device="cpu", smoke=True, **others)


class Plain(AttentionLibrary):
    """Right, by the reference; a child of it breaks something."""

    name, title = "plain", "the reference"

    def prepare(self, inputs: Any) -> Prepared:
        from pagetwin.reference.attention.paged import paged_attention

        if inputs.workload.kind in ("encoder", "write"):
            raise Declined("only pages")
        out = inputs.fresh()
        batch = (inputs.block_table, inputs.query_start_loc, inputs.seq_lens)
        lens = (inputs.max_query_len, inputs.max_seq_len)
        return Prepared(
            lambda: self.change(
                paged_attention(
                    inputs.query,
                    inputs.key_cache,
                    inputs.value_cache,
                    *batch,
                    *lens,
                    out=out,
                    scale=inputs.workload.scale,
                    options=inputs.options(),
                )
            )
        )

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return out


class AsOurs(Plain):
    """Under our name, so that a run needs no interpreter."""

    name = "ours"


class Scales(Plain):
    name = "scales"

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return out.mul_(1.5)
