"""Every entry point that needs an optional library names it, and what installs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pagetwin.contract.extras import EXTRAS

CASE = (
    "reproduce('reference', 'every new token gets the slot that its row says', '1')\n"
)
COMMANDS = {
    "hypothesis": (
        "check reference",
        "check reference --probe",
        "fuzz reference",
        "export out",
        "puzzles --check",
        "reproduce case.py",
    ),
    "jinja2": ("replay --report r.html", "check reference --html r.html"),
    "matplotlib": ("replay --report r.html", "bench --plot p.svg"),
    "sglang": (),
    "transformers": (),
    "vllm": (),
    "xformers": ("replay --twins xformers --device cpu --requests 1",),
    "triton": (
        "replay --device cpu --requests 1",
        "replay --device cpu --requests 1 --twins triton",
        "bench --smoke --device cpu write-8k",
    ),
}
STATEMENTS = {
    "hypothesis": (
        "from pagetwin.conformance import check_implementation",
        "from pagetwin.conformance import fuzz_implementation",
        "from pagetwin.conformance import parametrize_with_laws",
        "from pagetwin.conformance import reproduce",
        "import pagetwin.conformance.laws.all_laws",
        "import pagetwin.conformance.cases.batches",
        "from pagetwin.conformance.api.check import check_implementation",
        "from pagetwin.conformance.api.probe import probe_support",
    ),
    "jinja2": (),
    "matplotlib": (),
    "sglang": (
        "from pagetwin.integrations.sglang import register; register()",
        "import os; os.environ['PAGETWIN_RECORD'] = 'out'\n"
        "import pagetwin.recorder.wrappers.sglang as w; w.record_sglang_backends()",
    ),
    "transformers": (
        "import pagetwin.integrations.transformers",
        "from pagetwin.integrations.transformers import generate",
        "import pagetwin.integrations.transformers.paged_cache",
    ),
    "vllm": (
        "from pagetwin.integrations.vllm import register; register()",
        "from pagetwin.integrations.vllm import choose_backend; choose_backend()",
        "import pagetwin.integrations.vllm.plugin as p; p.serve_on_cpu()",
        "import pagetwin.integrations.vllm.versions as v; v.installed_interface()",
        "import os; os.environ['PAGETWIN_RECORD'] = 'out'\n"
        "import pagetwin.recorder.wrappers.vllm as w; w.record_vllm_backends()",
    ),
    "xformers": (
        "import torch; from pagetwin.engine.selector import get_attn_backend\n"
        "from pagetwin.contract.specs import KVCacheSpec\n"
        "get_attn_backend('XFORMERS', KVCacheSpec(16, 8, 64, torch.float16), 'cpu')",
    ),
    "triton": (
        "import pagetwin.optimized",
        "from pagetwin.optimized.attention.paged import paged_attention",
        "from pagetwin.engine.selector import load_backend; load_backend('TRITON')",
    ),
}
RUN = """
import json, os, sys
missing, lines = json.loads(sys.stdin.read())
os.environ["TRITON_INTERPRET"] = "1"
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *rest):
        return None if name.split(".")[0] == missing else self.finder.find_spec(name, *rest)
sys.meta_path[:] = map(Without, sys.meta_path)
from typer.testing import CliRunner
from pagetwin.tools.cli import app
for is_command, line in lines:
    if is_command:
        found = CliRunner().invoke(app, line.split())
        said = [found.exit_code, found.output.strip()]
    else:
        try:
            exec(line, {})
            said = [0, ""]
        except (ImportError, ValueError) as error:
            said = [2, str(error)]
    print(json.dumps(said), flush=True)
"""


@pytest.mark.extended
@pytest.mark.parametrize("library", COMMANDS)
def test_a_missing_library_is_one_sentence_with_what_installs_it(
    library: str, tmp_path: Path
) -> None:
    (tmp_path / "case.py").write_text(CASE)
    lines = [
        *((True, line) for line in COMMANDS[library]),
        *((False, line) for line in STATEMENTS[library]),
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps([library, lines]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(lines), done.stderr[-2000:]
    install = f"pagetwin[{EXTRAS[library]}]" if library in EXTRAS else "'triton>=3.6"
    for (_, line), (code, said) in zip(lines, found, strict=True):
        assert code == 2, (line, said)
        assert "pip install" in said and install in said, (line, said)
        assert len(said.splitlines()) == 1, (line, said)
    assert [path.name for path in tmp_path.iterdir()] == ["case.py"]
