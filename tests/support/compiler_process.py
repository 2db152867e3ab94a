"""A process without the interpreter, in which scripts compile kernels or record their launches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def run_compiler(*arguments: object) -> str:
    """Run Python with these arguments without TRITON_INTERPRET, and return what it printed.

    Raises:
        AssertionError: It failed. The message is the end of its error output.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def json_lines(*arguments: object) -> list[Any]:
    """Run a script as `run_compiler` does, and return the JSON value of each printed line."""
    return [json.loads(line) for line in run_compiler(*arguments).splitlines()]
