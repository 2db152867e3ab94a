"""The page of the small engine: its code, what it prints, and its run for the block map."""

import json
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

from block_map import colours_of, describe_step, states_of
from pagetwin import reference
from pagetwin.contract.scheduler_classes import Request, SchedulerOutput
from pagetwin.examples import small_engine

ENGINE_DATA = "js/engine_data.js"


def engine_code(part: str) -> str:
    """Return the lines of the example between the comments `begin` and `end` of a part."""
    text = Path(small_engine.__file__).read_text(encoding="utf-8")
    found = re.search(
        rf"(.*?)^( *)# begin: {part}\n(.*?)^ *# end: {part}$", text, re.S | re.M
    )
    if not found:
        raise ValueError(f"small_engine.py has no part {part!r}")
    before, indent, code = found.groups()
    if indent:
        # the class that the part is in, without its docstring
        code = re.findall(r"^class .*:$", before, re.M)[-1] + f"\n{code}"
    # it needs the names that the file imports, so it is shown and not run
    return f"```py\n{code.rstrip()}\n```"


def engine_run() -> str:
    """Return what the example prints."""
    lines = "\n".join(small_engine.run_example(reference))
    return f"```text\n{lines}\n```"


def engine_data() -> str:
    """Return the run of the example as a recording that the block map plays."""
    engine = small_engine.PagedEngine(
        small_engine.ToyModel(), reference, small_engine.SIZES
    )
    scheduler, manager = engine.scheduler, engine.scheduler.block_manager
    update = scheduler.update_from_output
    steps: list[dict[str, Any]] = []
    held: set[Hashable] = set()

    def recorded(output: SchedulerOutput, tokens: Mapping[Hashable, int]) -> None:
        step = describe_step(scheduler, output, held)
        step["blocks"] = states_of(manager)
        update(output, tokens)
        held.clear()
        held.update(request.request_id for request in scheduler.running)
        step["finished"] = [
            part.request.request_id
            for part in output.scheduled_requests
            if part.request.is_finished
        ]
        steps.append(step)

    scheduler.update_from_output = recorded
    prompts = small_engine.PROMPTS
    requests = [
        Request(name, prompt, small_engine.MAX_TOKENS)
        for name, prompt in prompts.items()
    ]
    for _ in engine.generate(requests):
        pass
    recording = {
        "blockSize": small_engine.SIZES.block_size,
        "numBlocks": small_engine.SIZES.num_blocks,
        "prompts": [len(prompt) for prompt in prompts.values()],
        "colours": colours_of(steps),
        "steps": steps,
    }
    return f"window.blockMapData = {json.dumps({'engine': recording})};\n"
