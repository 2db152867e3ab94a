"""The HTML report of a replay: one page without scripts, pictures included, no network needed."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import write_text
from .figures import scaled_lengths
from .run import StepRecord


def write_report(
    path: Path, figures: Mapping[str, Any], records: Sequence[StepRecord]
) -> None:
    """Write the page; the file appears complete or not at all.

    Args:
        path: file to write.
        figures: what `summarize` returned.
        records: the steps, with the holder of every block.
    """
    write_text(path, render_report(figures, records))


def render_report(figures: Mapping[str, Any], records: Sequence[StepRecord]) -> str:
    """Return the page as text."""
    import jinja2

    from .pictures import (
        draw_agreement,
        draw_batches,
        draw_holders,
        draw_occupancy,
        draw_times,
    )

    settings = figures["settings"]
    pictures = {
        "holders": draw_holders(records),
        "batches": draw_batches(records, settings["token_budget"]),
        "occupancy": draw_occupancy(records),
        "agreement": draw_agreement(records, settings["twins"]),
        "times": draw_times(figures),
    }
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = (Path(__file__).parent / "report.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        figures=figures,
        settings=settings,
        scaled=scaled_lengths(figures),
        pictures={name: _inside(svg) for name, svg in pictures.items()},
    )


def _inside(svg: str) -> str:
    """Return a data URL of the picture.

    Inline SVG would not do: ids of two pictures in one page would clash.
    """
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
