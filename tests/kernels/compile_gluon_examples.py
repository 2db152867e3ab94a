"""Compile the kernels of shared/examples/gluon for Hopper, and print a line of JSON for each."""

import json
from pathlib import Path

from pagetwin.tools.interpret_command import load_launches
from support.compile_prefill_sm90 import compile_case

FOLDER = Path(__file__).parents[2] / "shared/examples/gluon"

for path in sorted(FOLDER.glob("[!_]*.py")):
    kernel, _, arguments = next(iter(load_launches(path)()))
    _, report = compile_case(
        dict(zip(kernel.arg_names, arguments, strict=True)), kernel
    )
    print(json.dumps({"file": path.stem, **report}), flush=True)
