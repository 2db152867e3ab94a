"""vLLM's server with this project's backend: greedy completions over HTTP, and the flight recorder.

    python tests/gpu/serving/server.py OUTDIR --backends FLASH_ATTN CUSTOM

Writes a small Llama with random weights and a tokenizer of whole words, starts one server per
backend, each with the recorder, and sends the same prompts to each, several at once. The plugin
is found by its entry point, so the package must be installed. OUTDIR/server.jsonl gets a JSON line
per backend and one per pair, and OUTDIR/NAME.log what each server printed. The exit code is 1 if a
server did not answer, is not that backend, or the recorder found something.
"""

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path
from typing import Any

from run import WORK, environment

HERE = Path(__file__).resolve().parent
FIRST_PORT = 8100
HEADS, KV_HEADS, SIZE = 8, 2, 64
WORDS = 512
LIMIT = 300
"""Seconds until a server must answer."""
CHOICE = r"Using AttentionBackendEnum\.(\w+) backend"
"""What vLLM logs about the backend that it has chosen."""


def write_model(folder: Path) -> Path:
    """Write a Llama of two layers with seeded weights, and a tokenizer with a word per token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HEADS * SIZE,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=WORDS,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        # large enough that attention decides the next token
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    vocab = {f"word{index}": index for index in range(WORDS)}
    made = Tokenizer(models.WordLevel(vocab, unk_token="word0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="word0",
        bos_token="word1",
        eos_token="word2",
    )
    made.save_pretrained(folder)
    return folder


class Server:
    """A server process.

    Args:
        asked: the arguments of the command.
        backend: name of the attention backend.
        port: where it listens.
    """

    def __init__(self, asked: argparse.Namespace, backend: str, port: int) -> None:
        self.backend, self.url = backend, f"http://127.0.0.1:{port}"
        self.log = asked.out / f"{backend}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(asked.model), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--served-model-name", "small"]
        command += ["--attention-backend", backend, "--dtype", asked.dtype]
        command += ["--max-model-len", "1024", "--max-num-seqs", "16"]
        # several servers share a GPU, or the memory of the host
        command += ["--gpu-memory-utilization", "0.2", *asked.options]
        variables = environment(WORK)
        del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
        variables |= {
            "PAGETWIN_RECORD": str(asked.out / f"cases-{backend}"),
            "PAGETWIN_RECORD_EVERY": "4",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
            )

    def ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Return the answer to a request."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content: bytes = answer.read()
        return content

    def wait(self, until: float) -> bool:
        """Wait until the server answers; return whether it does."""
        while time.time() < until and self.process.poll() is None:
            try:
                self.ask("/health")
            except OSError:
                time.sleep(0.5)
            else:
                return True
        return False

    def complete(self, prompt: str) -> list[str]:
        """Return the words after a prompt."""
        body = {
            "model": "small",
            "prompt": prompt,
            "max_tokens": 32,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = json.loads(self.ask("/v1/completions", body))
        words: list[str] = answer["choices"][0]["text"].split()
        return words

    def stop(self) -> None:
        """End the server as a user would, or at once if it does not."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)


def draw_prompts(count: int) -> list[str]:
    """Return prompts of 8 to 600 words."""
    draw = random.Random(7)
    sizes = [draw.randrange(8, 600) for _ in range(count)]
    return [
        " ".join(f"word{draw.randrange(3, WORDS)}" for _ in range(size))
        for size in sizes
    ]


def describe(server: Server, completions: list[list[str]]) -> dict[str, Any]:
    """Return what a server did, from its log too."""
    text = server.log.read_text()
    cases = server.log.parent / f"cases-{server.backend}"
    checked = [line for line in text.splitlines() if "steps checked" in line]
    return {
        "event": "served",
        "backend": server.backend,
        # on a CPU vLLM does not name its own backend
        "named_in_the_log": sorted(set(re.findall(CHOICE, text))),
        "prompts": len(completions),
        "words": sum(map(len, completions)),
        "recorder": checked[-1].split("flight recorder: ")[-1] if checked else "",
        "violations": len([*cases.glob("*.pt")]),
    }


def compare(one: list[list[str]], two: list[list[str]]) -> dict[str, int]:
    """Return how many completions are equal, and the words before their first differences."""
    before = 0
    for words, others in zip(one, two, strict=True):
        pairs = enumerate(zip(words, others, strict=True))
        before += next((at for at, (a, b) in pairs if a != b), len(words))
    return {
        "equal_prompts": sum(a == b for a, b in zip(one, two, strict=True)),
        "prompts": len(one),
        "words_before_first_difference": before,
        "words": sum(map(len, one)),
    }


def main() -> int:
    """Start the servers, ask them, and return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("out", type=Path)
    add("--backends", nargs="+", default=["FLASH_ATTN", "CUSTOM"])
    add("--prompts", type=int, default=16)
    add("--dtype", default="bfloat16")
    add("--options", type=str.split, default=[], help="of the server, in one word")
    asked = parser.parse_args()
    asked.out = asked.out.resolve()
    asked.out.mkdir(parents=True, exist_ok=True)
    asked.model = write_model(asked.out / "model")
    began = time.time()
    servers = [
        Server(asked, backend, FIRST_PORT + index)
        for index, backend in enumerate(asked.backends)
    ]
    import torch
    import vllm

    lines: list[dict[str, Any]] = [
        {
            "event": "versions",
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name()
            if torch.cuda.is_available()
            else "cpu",
            "dtype": asked.dtype,
        }
    ]
    found: dict[str, list[list[str]]] = {}
    try:
        for server in servers:
            missing = {"event": "no answer", "backend": server.backend}
            if not server.wait(began + LIMIT):
                lines.append(missing)
                continue
            ready = round(time.time() - began, 1)
            try:
                with ThreadPoolExecutor(8) as pool:
                    words = [*pool.map(server.complete, draw_prompts(asked.prompts))]
            except OSError as error:
                lines.append({**missing, "error": str(error)})
                continue
            found[server.backend] = words
            lines.append({**describe(server, words), "answered_after_s": ready})
    finally:
        for server in servers:
            server.stop()
    for one, two in combinations(found, 2):
        pair = {"event": "compared", "backend": two, "other": one}
        lines.append({**pair, **compare(found[one], found[two])})
    with (asked.out / "server.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    wrong = [
        line
        for line in lines
        if line["event"] == "no answer"
        or line.get("violations")
        or set(line.get("named_in_the_log", ())) - {line.get("backend")}
    ]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
