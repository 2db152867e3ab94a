"""Names of the vLLM plugin's backend: CUSTOM in all releases, PAGETWIN where vLLM takes names."""

import copy
import pickle
import sys
from typing import Any

import pytest
from support.fake_vllm import VERSIONS, fake_vllm, recorded

pytestmark = pytest.mark.quick

REGISTRY = "vllm.v1.attention.backends.registry"
OURS = "pagetwin.integrations.vllm.plugin"


def takes_names(version: str) -> bool:
    """Return whether that release has a method that adds a name."""
    classes = recorded(version)["modules"][REGISTRY]["classes"]
    return "register" in classes["AttentionBackendEnum"]["methods"]


NAMED = [version for version in VERSIONS if takes_names(version)]


def test_names_are_taken_from_0_32_on() -> None:
    """Read in the wheels: up to 0.31 members alone are taken."""
    from pagetwin.integrations.vllm.versions import find_interface

    assert [version for version in VERSIONS if version >= "0.32"] == NAMED
    assert all(
        find_interface(version).takes_names == (version in NAMED)
        for version in VERSIONS
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_selects_a_class_that_returns_it(version: str) -> None:
    """vLLM looks the name of a layer's backend up among its members."""
    for use_mla in (False, True):
        with fake_vllm(version, use_mla):
            from pagetwin.integrations.vllm import plugin

            plugin.register()
            plugin.register()  # vLLM calls plugins several times per process
            names = sys.modules[REGISTRY].AttentionBackendEnum  # type: ignore[attr-defined]
            found = {"CUSTOM", "PAGETWIN"} & set(names.__members__)
            for name in sorted(found):
                backend = names[name].get_class()
                assert names[backend.get_name()] is names[name]
                assert ("Latent" in backend.__name__) == use_mla
            assert ("PAGETWIN" in found) == (version in NAMED)


@pytest.mark.parametrize("version", NAMED)
def test_custom_stays_with_the_package_that_has_it(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_vllm(version), caplog.at_level("INFO"):
        from pagetwin.integrations.vllm import plugin

        registry: Any = sys.modules[REGISTRY]
        custom = registry.AttentionBackendEnum["CUSTOM"]
        registry.register_backend(custom, "other.package.Backend")
        plugin.register()
        assert custom.get_path() == "other.package.Backend"
        named = registry.AttentionBackendEnum["PAGETWIN"]
        assert named.get_path() == f"{OURS}.NamedBackend"
    (said,) = [line for line in caplog.messages if "other.package" in line]
    assert said.startswith("CUSTOM is other.package.Backend: choose")


def test_older_releases_have_one_name_and_say_who_lost_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_vllm(VERSIONS[0]), caplog.at_level("WARNING"):
        from pagetwin.integrations.vllm import plugin

        registry: Any = sys.modules[REGISTRY]
        custom = registry.AttentionBackendEnum["CUSTOM"]
        registry.register_backend(custom, "other.package.Backend")
        plugin.register()
        plugin.register()
        assert custom.get_path() == f"{OURS}.Backend"
    (said,) = caplog.messages
    assert "CUSTOM was other.package.Backend" in said and "VLLM_PLUGINS" in said


@pytest.mark.parametrize("version", NAMED)
def test_a_recorded_backend_is_still_the_plugins(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the recorder the path of a name leads into the recorder."""
    with fake_vllm(version):
        from pagetwin.integrations.vllm import plugin
        from pagetwin.recorder.wrappers import vllm as recorder

        monkeypatch.setattr(recorder, "_PATHS", {})
        monkeypatch.setenv("PAGETWIN_RECORD", "/tmp/cases")
        for _ in range(2):
            plugin.register()
            names = sys.modules[REGISTRY].AttentionBackendEnum  # type: ignore[attr-defined]
            for name in ("CUSTOM", "PAGETWIN"):
                assert names[name].get_path() == f"{plugin.RECORDER}.{name}"
                assert plugin._path_of(names[name]) == plugin.PATHS[name]


@pytest.mark.parametrize("version", NAMED)
def test_a_spawned_process_reads_the_name_before_it_loads_plugins(version: str) -> None:
    """A member is pickled by its value, and a new process has none of that value."""
    with fake_vllm(version):
        from pagetwin.integrations.vllm import plugin

        registry: Any = sys.modules[REGISTRY]
        # a member of the stand-in's enumeration is found by its module and name
        registry.AttentionBackendEnum.__module__ = REGISTRY
        plugin.register()
        names = registry.AttentionBackendEnum
        sent = pickle.dumps([names["PAGETWIN"], names["CUSTOM"], names["FLASH_ATTN"]])
        assert copy.deepcopy(names["PAGETWIN"]) is names["PAGETWIN"]
    with fake_vllm(version):
        registry = sys.modules[REGISTRY]
        registry.AttentionBackendEnum.__module__ = REGISTRY
        assert "PAGETWIN" not in registry.AttentionBackendEnum.__members__
        read = pickle.loads(sent)
        names = registry.AttentionBackendEnum
        assert read == [names["PAGETWIN"], names["CUSTOM"], names["FLASH_ATTN"]]
        assert read[0].get_path() == f"{OURS}.NamedBackend"
