"""Write a solution of FlashInfer-Bench: a JSON file that contains the source of a kernel."""

import json
import sys
from pathlib import Path

source, definition, file = sys.argv[1:]
solution = {
    "name": Path(source).stem,
    "definition": definition,
    "author": "me",
    "spec": {
        "language": "triton",
        "target_hardware": ["NVIDIA_H100"],
        "entry_point": "main.py::run",
        "dependencies": ["torch", "triton"],
        "destination_passing_style": True,
    },
    "sources": [{"path": "main.py", "content": Path(source).read_text()}],
}
Path(file).write_text(json.dumps(solution, indent=2))
