"""On what, and with what, was something measured?"""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "xformers", "flashinfer-python", "vllm", "numpy")
CARD = {
    "driver": "driver_version",
    "power_limit": "power.limit",
    "power_draw": "power.draw",
    "temperature": "temperature.gpu",
    "clock_sm": "clocks.sm",
    "clock_sm_max": "clocks.max.sm",
    "clock_memory": "clocks.mem",
}
"""What nvidia-smi is asked."""


def describe_machine(device: str) -> dict[str, Any]:
    """Return date, device, versions and commit, as far as each is known."""
    now = datetime.datetime.now(datetime.timezone.utc)
    found: dict[str, Any] = {
        "date": now.isoformat(timespec="seconds"),
        "device": platform.processor() or platform.machine(),
        "commit": find_commit(),
        "versions": {"python": platform.python_version()},
        "cuda": torch.version.cuda,
        "card_before": describe_card() if device == "cuda" else None,
    }
    for package in PACKAGES:
        try:
            found["versions"][package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found["versions"][package] = None
    found["versions"]["torch"] = torch.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
    return found


def describe_card() -> dict[str, str] | None:
    """Return clocks, power and temperature as nvidia-smi says them; None: it is not here."""
    asked = ",".join(CARD.values())
    answer = _ask(["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"])
    if answer is None:
        return None
    values = [value.strip() for value in answer.split("\n")[0].split(",")]
    return dict(zip(CARD, values, strict=False))


def find_commit() -> str | None:
    """Return the commit of this checkout, with a mark if it was changed since; None: no git."""
    folder = str(Path(__file__).resolve().parent)
    commit = _ask(["git", "-C", folder, "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _ask(["git", "-C", folder, "status", "--porcelain", "-uno"])
    return f"{commit}, changed" if changed else commit


def _ask(command: list[str]) -> str | None:
    """Return what a program prints; None: it is not there or fails."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
