"""Tables of the mutants: which the conformance suite kills, and which law kills them.

The tables are made from the report that `make mutants` writes.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[2] / "tests" / "records" / "mutants.json"
ENDS = ("killed", "alive", "equivalent")
GENERATED_ENDS = ("killed", "survived", "equivalent")


def mutant_table(part: str) -> str:
    """Return a part of the report.

    Args:
        part: "counts", "operators", "laws", "alive" or "equivalent"; "generated" and "hopper" are
            the tables of the reports of `make mutants-generated` and `make mutants-hopper`, and
            "hopper kernels" is that of the latter kernel by kernel.
    """
    if part in ("generated", "hopper"):
        return _generated(RECORD.with_name(f"mutants-{part}.json"))
    if part == "hopper kernels":
        return _kernels(RECORD.with_name("mutants-hopper.json"))
    if not RECORD.exists():
        return "*No full run is recorded yet.*"
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    mutants = record["mutants"]
    if part == "counts":
        return _counts(record)
    if part == "operators":
        return _operators(record)
    if part == "laws":
        laws = Counter(each["law"] for each in mutants if each["law"])
        rows = [f"| {law} | {count} |" for law, count in laws.most_common()]
        return "\n".join(["| law | mutants killed |", "|---|---:|", *rows])
    if part in ("alive", "equivalent"):
        return _named([each for each in mutants if each["ended"] == part])
    raise ValueError(
        f"part = {part!r}: expected counts, operators, laws, alive, equivalent, generated, hopper"
        " or hopper kernels"
    )


def _kernels(path: Path) -> str:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "| kernels | mutants | tried | killed | survived | equivalent |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for folder, count in sorted(record["folders"].items()):
        own = [
            each
            for each in record["mutants"]
            if each["file"].rpartition("/")[0].endswith(f"/{folder}")
        ]
        ends = Counter(each["ended"] for each in own)
        title = "prefill, and shared files" if folder == "sm90" else folder
        numbers = [count, len(own), *(ends[end] for end in GENERATED_ENDS)]
        lines.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def _generated(path: Path) -> str:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    mutants, ends = record["mutants"], GENERATED_ENDS
    lines = ["| change | killed | survived | equivalent |", "|---|---:|---:|---:|"]
    for name, meaning in (*record["operators"].items(), ("all", "")):
        own = [each for each in mutants if name in (each["operator"], "all")]
        counts = Counter(each["ended"] for each in own)
        title = f"{name}: {meaning}" if meaning else f"**{name}**"
        numbers = " | ".join(str(counts[end]) for end in ends)
        lines.append(f"| {title.replace('|', chr(92) + '|')} | {numbers} |")
    lines += ["", f"These are {len(mutants)} of {record['generated']} mutants."]
    return "\n".join(lines)


def _counts(record: dict[str, Any]) -> str:
    mutants = record["mutants"]
    ends = Counter(each["ended"] for each in mutants)
    times = sorted(each["seconds"] for each in mutants)
    packages = Counter(each["id"].partition("/")[0] for each in mutants)
    return (
        f"Of {len(mutants)} mutants ({packages['reference']} of the reference,"
        f" {packages['optimized']} of the optimized twin) the suite killed **{ends['killed']}**;"
        f" **{ends['alive']}** survive; {ends['equivalent']} are equivalent. It has"
        f" {record['laws']} laws and draws {record['examples']} cases per law. The run took"
        f" {record['seconds'] / 60:.0f} minutes; the median per mutant is"
        f" {times[len(times) // 2]:.1f} s."
    )


def _operators(record: dict[str, Any]) -> str:
    lines = [
        "| change | example | killed | alive | equivalent |",
        "|---|---|---:|---:|---:|",
    ]
    for name, meaning in record["operators"].items():
        own = [each for each in record["mutants"] if each["operator"] == name]
        ends = Counter(each["ended"] for each in own)
        instance = next(each for each in own if not each["bug"].startswith("cousin"))
        counts = " | ".join(str(ends[end]) for end in ENDS)
        lines.append(f"| {name}: {meaning} | {_title(instance)} | {counts} |")
    return "\n".join(lines)


def _named(mutants: list[dict[str, Any]]) -> str:
    if not mutants:
        return "None."
    lines = []
    for each in mutants:
        reason = f": {each['reason']}" if each["reason"] else "."
        lines.append(
            f"- {_title(each)}, in `{each['id'].rpartition('/')[0]}.py`{reason}"
        )
    return "\n".join(lines)


def _title(mutant: dict[str, Any]) -> str:
    words = mutant["id"].rpartition("/")[2].replace("-", " ")
    return f"*{words}* ({mutant['bug']})"
