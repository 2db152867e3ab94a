"""Description of the machine: device, versions, commit, clocks and temperature."""

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
"""Fields that are read from nvidia-smi."""


def describe_machine(device: str) -> dict[str, Any]:
    """Return date, device, versions and commit. Unknown values are None."""
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
    """Return clocks, power and temperature from nvidia-smi, or None without it."""
    fields = ",".join(CARD.values())
    answer = _output_of(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    )
    if answer is None:
        return None
    values = [value.strip() for value in answer.split("\n")[0].split(",")]
    return dict(zip(CARD, values, strict=False))


def find_commit() -> str | None:
    """Return the commit of this checkout, marked if it has changes, or None without git."""
    folder = str(Path(__file__).resolve().parent)
    commit = _output_of(["git", "-C", folder, "rev-parse", "HEAD"])
    if commit is None:
        return None
    changed = _output_of(["git", "-C", folder, "status", "--porcelain", "-uno"])
    return f"{commit}, changed" if changed else commit


def _output_of(command: list[str]) -> str | None:
    """Return the output of a program, or None if it is missing or fails."""
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
