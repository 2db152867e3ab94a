"""`tests/gpu/release.py` with small programs in place of its jobs: order, GPUs, limits. No GPU."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from pagetwin.tools.cli import app
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
import release
from release import ALL, OWN, ROOT, SHARED, Job, Release

PROGRAM = """
import json, os, sys, time
from pathlib import Path
began, out = time.time(), Path(sys.argv[1])
(out / "began").touch()
for other in sys.argv[4:]:
    while not (out.parent / other / "began").exists() and time.time() < began + 15:
        time.sleep(0.01)
time.sleep(float(sys.argv[2]))
with open(out / "ran.json", "w") as file:
    gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    json.dump({"gpus": gpus, "began": began, "ended": time.time()}, file)
sys.exit(int(sys.argv[3]))
"""


def job(
    name: str, place: str = SHARED, code: int = 0, took: float = 0.5, beside: str = ""
) -> Job:
    """Return a job that waits, writes when and where it ran, and ends with a code.

    Args:
        name, place: of the job.
        code: its exit code.
        took: seconds that it waits.
        beside: Optional. Another job, for whose start it waits first. If empty, none.
    """
    words = ("-c", PROGRAM, "$OUT", str(took), str(code), *filter(None, [beside]))
    return Job(name, (sys.executable, *words), 20, place)


def run(
    folder: Path, jobs: list[Job], gpus: int = 2, seconds: float = 600
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run jobs on so many pretended GPUs; return the exit code, and when and where each ran."""
    names = [str(3 + index) for index in range(gpus)]
    code = Release(folder, names, "abc", time.time() + seconds).run(jobs)
    ran = {path.parent.name: path for path in folder.glob("*/ran.json")}
    return code, {name: json.loads(path.read_text()) for name, path in ran.items()}


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two jobs ran at the same time."""
    began, ended = one["began"] < other["ended"], other["began"] < one["ended"]
    return bool(began and ended)


def test_a_job_that_measures_has_its_gpu_or_the_host_for_itself(tmp_path: Path) -> None:
    shared = (job("tests", beside="check"), job("check", beside="tests"))
    jobs = [shared[0], job("bench", OWN), shared[1], job("serving", ALL)]
    code, ran = run(tmp_path, jobs)
    assert code == 0
    assert [ran[name]["gpus"] for name in ("tests", "bench", "check")] == [
        ["3"], ["4"], ["3"],
    ]  # fmt: skip
    assert ran["serving"]["gpus"] == ["3", "4"]
    assert not any(overlap(ran["serving"], ran[other.name]) for other in jobs[:3])
    assert overlap(ran["tests"], ran["check"])


def test_on_one_gpu_measurements_wait_for_jobs_that_share_it(tmp_path: Path) -> None:
    shared = (job("tests", beside="check"), job("check", beside="tests"))
    jobs = [*shared, job("bench", OWN), job("later")]
    code, ran = run(tmp_path, jobs, gpus=1)
    assert code == 0 and overlap(ran["tests"], ran["check"])
    assert not any(
        overlap(ran["bench"], ran[name]) for name in ("tests", "check", "later")
    )


def test_a_run_continues_where_the_last_one_stopped(tmp_path: Path) -> None:
    jobs = [job("good", took=0.1), job("bad", code=3, took=0.1)]
    code, ran = run(tmp_path, jobs)
    assert code == 1
    for name in ("good", "bad"):
        shutil.rmtree(tmp_path / name)
    code, ran = run(tmp_path, [jobs[0], job("bad", took=0.1)])
    assert code == 0 and set(ran) == {"bad"}


def test_what_does_not_fit_into_the_time_or_the_host_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = Job("two", ("true",), 5, ALL, gpus=2)
    long = Job("long", ("true",), 30)
    code, _ = run(tmp_path, [long, two, job("short", took=0.1)], gpus=1, seconds=25)
    assert code == 2
    assert "not started: ['long', 'two']" in capsys.readouterr().out
    assert not (tmp_path / "long").exists()


def test_a_job_is_stopped_at_its_limit(tmp_path: Path) -> None:
    # a process of the background may ignore SIGINT, by which it is asked to end
    program = "import signal, time; signal.signal(2, signal.SIG_DFL); time.sleep(60)"
    slow = Job("slow", (sys.executable, "-c", program), 1)
    code, _ = run(tmp_path, [slow])
    line = json.loads((tmp_path / "jobs.jsonl").read_text())
    assert code == 1 and line["code"] is None and line["seconds"] < 20


@pytest.mark.parametrize("one", release.jobs(), ids=lambda one: one.name)
def test_every_job_names_programs_and_options_that_exist(one: Job) -> None:
    if "bench" in one.command:
        given = [*one.command[one.command.index("bench") :], "--help"]
        assert CliRunner().invoke(app, given).exit_code == 0
        return
    words = " ".join(one.command).replace(sys.executable, "").split()
    programs = [Path(word) for word in words if word.endswith(".py")]
    assert programs and all((ROOT / program).is_file() for program in programs)
    source = programs[0].read_text()
    own = [word for word in words if word.startswith("--") and "sh" not in one.command]
    assert all(f'"{option}"' in source for option in own)


def test_every_group_of_kernels_runs_under_the_sanitizer() -> None:
    source = (ROOT / "tests" / "gpu" / "sanitized.py").read_text()
    groups = re.findall(r'^    "([\w-]+)": Group\(', source, re.MULTILINE)
    assert sorted(groups) == sorted(release.SANITIZED.split())


def test_the_tests_of_kernels_exist() -> None:
    names = release.KERNEL_TESTS.split()
    assert all((ROOT / release.file_of_tests(name)).is_file() for name in names)


def test_names_of_jobs_are_folders_of_their_own() -> None:
    names = [known.name for known in release.jobs()]
    assert len(set(names)) == len(names)


def test_staged_archives_are_importable_after_activation(tmp_path: Path) -> None:
    staged, site = tmp_path / "staged", tmp_path / "site"
    for name in ("staged_package/__init__.py", "staged_package/_vllm_fa3_C.abi3.so"):
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).touch()
    staged.mkdir()
    with tarfile.open(staged / "site.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "files" / "staged_package", "staged_package")
    command = (
        f"source tests/gpu/activate.sh {staged}; source tests/gpu/activate.sh {staged};"
        " PYTHONPATH=$VLLM_PATH python3 -c 'import staged_package as it; print(it.__file__)';"
        ' echo "$PAGETWIN_FA3" ${PAGETWIN_FLASHMLA:-none}'
    )
    said = subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT,
        env=os.environ | {"PAGETWIN_SITE": str(site)},
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    imported, libraries = said.stdout.splitlines()
    assert imported == str(site / "vllm" / "staged_package" / "__init__.py")
    assert libraries == f"{site}/vllm/staged_package/_vllm_fa3_C.abi3.so none"


def test_only_jobs_with_an_engine_import_the_staged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PATH", str(tmp_path / "vllm"))
    show = ("sh", "-c", 'echo "$$PYTHONPATH" > $OUT/path')
    run(tmp_path, [Job("tests", show, 9), Job("serving", show, 9, is_engine=True)])
    paths = [(tmp_path / name / "path").read_text() for name in ("tests", "serving")]
    assert ["vllm" in path.split(os.pathsep)[-1] for path in paths] == [False, True]
