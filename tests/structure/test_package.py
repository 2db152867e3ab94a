"""The package `pagetwin`: its version, its parts, and folders of the same name."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pagetwin
import pytest
from support.source_tree import FOLDERS, ROOT


def run(code: str, folder: Path, **environment: str) -> str:
    """Return the last line that a new process prints, started in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def test_the_package_has_the_version_of_the_distribution() -> None:
    assert pagetwin.__version__ == version("pagetwin")


def test_the_parts_are_the_folders() -> None:
    assert set(pagetwin.PACKAGES) == set(FOLDERS)
    assert set(dir(pagetwin)) == {"__version__", *FOLDERS}


def test_a_part_is_imported_when_it_is_first_used(tmp_path: Path) -> None:
    code = (
        "import sys, pagetwin; before = 'torch' in sys.modules;"
        " print(before, pagetwin.contract.__name__)"
    )
    assert run(code, tmp_path) == "False pagetwin.contract"


def test_another_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pagetwin' has no attribute 'nosuch'"):
        _ = pagetwin.nosuch


@pytest.mark.extended
@pytest.mark.parametrize("part", ["reference", "optimized"])
def test_a_checkout_in_the_current_folder_is_not_mixed_with_the_installed_package(
    tmp_path: Path, part: str
) -> None:
    """`import pagetwin.reference` took the checkout's files, and the rest from the installation."""
    (tmp_path / "pagetwin").symlink_to(ROOT)
    found = run(f"import pagetwin.{part}", tmp_path)
    assert found.startswith("ImportError: pagetwin was found as a folder in "), found
    assert found.endswith("Start Python in another folder, or move the script")
    # an installed wheel is found first, as this folder of links is
    code = f"import pagetwin.{part} as part; print(part.__file__)"
    links = ROOT / ".typing"
    found = run(code, tmp_path, PYTHONPATH=str(links))
    assert found == str(links / "pagetwin" / part / "__init__.py")


def test_the_former_name_of_shared_bodies_leads_to_the_reference() -> None:
    for name in ("pagetwin.bookkeeping", "pagetwin.bookkeeping.cache.block_manager"):
        with pytest.raises(
            ImportError, match=r"pagetwin\.reference\.cache\.block_manager"
        ):
            import_module(name)


@pytest.mark.parametrize(
    ("name", "leads_to"),
    [
        ("harness", "api"),
        ("harness.support", "base"),
        ("harness.runner", "api"),
        ("harness.expect", "checks"),
        ("generators.batches", "cases"),
    ],
)
def test_a_former_name_of_the_conformance_suite_leads_to_the_new_one(
    name: str, leads_to: str
) -> None:
    with pytest.raises(ImportError, match=rf"pagetwin\.conformance\.{leads_to}\b"):
        import_module(f"pagetwin.conformance.{name}")
    assert import_module(f"pagetwin.conformance.{leads_to}")


@pytest.mark.parametrize(
    ("name", "leads_to"),
    [
        ("sequence_classes", ["v0.sequence_classes"]),
        ("graph_classes", ["graph_support", "v0.graph_classes"]),
    ],
)
def test_a_former_name_of_the_contract_leads_to_the_new_ones(
    name: str, leads_to: list[str]
) -> None:
    with pytest.raises(ImportError) as raised:
        import_module(f"pagetwin.contract.{name}")
    for inner in leads_to:
        assert f"pagetwin.contract.{inner}" in str(raised.value)
        assert import_module(f"pagetwin.contract.{inner}")
