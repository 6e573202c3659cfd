"""What the setting does to LMCache, and that without it nothing is touched. Each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from lmcache_harness import installed_here

STATE = """
import json, sys
import lmcache
import lmcache.v1.distributed.storage_manager as sm
import lmcache.v1.distributed.serde as serde
import lmcache.v1.distributed.l2_adapters.config as config
import lmcache.v1.distributed.l2_adapters.serde_wrapper as wrapper
classes = [sm.StorageManager, config.L2AdapterConfigBase, wrapper.SerdeL2AdapterWrapper, serde.SerdeProcessor]
print("STATE" + json.dumps({
    "serdes": sorted(serde.get_registered_serde_types()),
    "module": {k: getattr(v, "__module__", "") for k, v in vars(sm).items() if callable(v)},
    "classes": {c.__name__: {k: getattr(v, "__module__", "") for k, v in vars(c).items()} for c in classes},
    "meta_path": [type(f).__module__ for f in sys.meta_path if not isinstance(f, type)],
    "ours": sorted(m for m in sys.modules if m.startswith("tq_offload") and m.count(".") > 2),
}))
"""

REGISTER = "import tq_offload.integrations.lmcache.vllm_plugin as p; p.register()"


def _run(code: str, folder: Path, env: dict[str, str], installed: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**installed_here(folder), **env}
    if not installed:
        (folder / "empty").mkdir(exist_ok=True)
        site, rest = environment["PYTHONPATH"], []
        for part in site.split(":"):
            rest.append(str(folder / "empty") if part == str(folder / "site") else part)
        environment["PYTHONPATH"] = ":".join(rest)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=folder)


def _state(folder: Path, env: dict[str, str], installed: bool = True) -> Any:
    result = _run(STATE, folder, env, installed)
    assert result.returncode == 0, result.stderr
    return json.loads(next(x for x in result.stdout.splitlines() if x.startswith("STATE"))[5:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("activation")


@pytest.fixture(scope="module")
def has_entry_points() -> bool:
    """LMCache 0.5.3 has no plugins."""
    import lmcache

    return not str(lmcache.__version__).startswith("0.5.3")


@pytest.fixture(scope="module")
def untouched(folder: Path) -> Any:
    """LMCache without this package."""
    return _state(folder, {}, installed=False)


@pytest.mark.parametrize("value", [None, "naive"])
def test_without_the_setting_nothing_changes(folder: Path, value: str | None, untouched: Any) -> None:
    env = {"TQ_OFFLOAD_BITS": "nonsense"}  # not even read
    found = _state(folder, env if value is None else {**env, "LMCACHE_SERDE": value})
    assert {**found, "ours": None} == {**untouched, "ours": None}


def test_with_the_setting_two_names_change_and_no_class(folder: Path, has_entry_points: bool, untouched: Any) -> None:
    if not has_entry_points:
        pytest.xfail("LMCache 0.5.3 offers no entry point: use the module or the explicit way")
    found = _state(folder, {"LMCACHE_SERDE": "turboquant"})
    assert set(found["serdes"]) - set(untouched["serdes"]) == {"tq_offload"}
    changed = {k for k, v in found["module"].items() if untouched["module"].get(k) != v}
    assert changed == {"create_l2_adapter", "SerdeL2AdapterWrapper"}
    assert found["classes"] == untouched["classes"]


BUILD = """
import json, sys, tempfile
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager
folder = sys.argv[0] and tempfile.mkdtemp()
specs = json.loads({specs!r})
args = ["--l1-size-gb", "0.05", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
for i, spec in enumerate(specs):
    args += ["--l2-adapter", json.dumps(dict(spec, base_path=folder + f"/{{i}}") if spec["type"] == "fs" else spec)]
config = parse_args(args)
config.l1_manager_config.memory_config.shm_name = ""
manager = StorageManager(config)
later = parse_args(args).l2_adapter_config.adapters[0]
manager.add_l2_adapter(later)
names = [type(a).__name__ for _, a in sorted(manager._l2_adapters.items())]
serdes = [type(getattr(a, "_serde", None)).__name__ for _, a in sorted(manager._l2_adapters.items())]
manager.close()
print("RESULT" + json.dumps([names, serdes]))
"""


def _build(folder: Path, specs: list[dict[str, Any]], env: dict[str, str], activate: bool = True) -> tuple[Any, str]:
    first = "import tq_offload.integrations.lmcache.activation as a; a.activate_or_exit()\n" if activate else ""
    result = _run(first + BUILD.format(specs=json.dumps(specs)), folder, env)
    assert result.returncode == 0, result.stderr
    line = next(x for x in result.stdout.splitlines() if x.startswith("RESULT"))
    return json.loads(line[6:]), result.stderr + result.stdout


def test_adapters_without_a_serde_get_ours_also_at_run_time_and_others_are_left_alone(folder: Path) -> None:
    specs = [{"type": "fs"}, {"type": "fs", "serde": {"type": "fp8"}}]
    (names, serdes), log = _build(folder, specs, {"LMCACHE_SERDE": "turboquant"})
    assert names == ["TurboQuantL2Adapter", "SerdeL2AdapterWrapper", "TurboQuantL2Adapter"]
    assert serdes == ["TurboQuantProcessor", "AsyncSerdeProcessor", "TurboQuantProcessor"]
    assert "L2 #0 fs (" in log
    assert "L2 #1 fs (" in log
    assert "left alone, has its own serde fp8" in log
    assert "L2 #2 fs (" in log


def test_without_the_setting_adapters_stay_as_they_are(folder: Path) -> None:
    (names, _), log = _build(folder, [{"type": "fs"}], {})
    assert names == ["FSL2Adapter", "FSL2Adapter"]
    assert "TQ-Offload" not in log


def test_the_explicit_way_needs_no_setting(folder: Path, tmp_path: Path) -> None:
    plugin = {
        "type": "plugin",
        "module_path": "tq_offload.integrations.lmcache.plugin",
        "class_name": "InnerAdapter",
        "adapter_params": {"type": "fs", "base_path": str(tmp_path)},
        "serde": {"type": "tq_offload", "bits": 3, "head_dim": 128},
    }
    (names, serdes), log = _build(folder, [plugin, {"type": "fs"}], {}, activate=False)
    assert names == ["TurboQuantL2Adapter", "FSL2Adapter", "TurboQuantL2Adapter"]
    assert serdes[0] == "TurboQuantProcessor"
    assert "compressed, turboquant K3V3" in log


def test_p2p_reads_other_servers_l1_and_is_left_alone() -> None:
    from lmcache.v1.distributed.l2_adapters.p2p_l2_adapter import P2PL2AdapterConfig

    from tq_offload.integrations.lmcache.activation import _with_serde

    config = P2PL2AdapterConfig.__new__(P2PL2AdapterConfig)
    assert _with_serde(lambda config, desc: config.serde_config)(config) is None


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"LMCACHE_SERDE": "Turboquant"}, "LMCACHE_SERDE='Turboquant' is not understood; allowed: turboquant"),
        ({"LMCACHE_SERDE": "turboquant", "TQ_OFFLOAD_PRESET": "x"}, "TQ_OFFLOAD_PRESET='x' is not understood"),
        ({"LMCACHE_SERDE": "turboquant", "TQ_OFFLOAD_PRESETS": "x"}, "TQ_OFFLOAD_PRESETS='x' is not understood"),
    ],
)
@pytest.mark.parametrize(
    "code", ["import lmcache", "import tq_offload.integrations.lmcache.vllm_plugin as p; p.register()"]
)
def test_bad_settings_stop_the_start(
    code: str, env: dict[str, str], text: str, folder: Path, has_entry_points: bool
) -> None:
    if code == "import lmcache" and not has_entry_points:
        pytest.xfail("LMCache 0.5.3 offers no entry point")
    result = _run(code, folder, env)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("TQ-Offload: cannot start: ")
    assert text in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unsupported_lmcache_stops_the_start(folder: Path, tmp_path: Path) -> None:
    info = tmp_path / "lmcache-0.9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 0.9.0\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{REGISTER}"
    result = _run(code, folder, {"LMCACHE_SERDE": "turboquant"})
    assert result.returncode == 1
    assert "lmcache 0.9.0 is installed; supported: lmcache 0.5.3 to 0.5.6" in result.stderr


def test_the_vllm_plugin_imports_neither_vllm_nor_lmcache(folder: Path) -> None:
    code = (
        "import sys\nfrom tq_offload.integrations.lmcache.vllm_plugin import register\nregister(); register()\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'lmcache')])"
    )
    result = _run(code, folder, {"LMCACHE_SERDE": "turboquant"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_process_of_the_engine_says_where_compression_happens(folder: Path, has_entry_points: bool) -> None:
    code = (
        "from tq_offload.integrations.lmcache.vllm_plugin import register\nregister()\n"
        "import lmcache.integration.vllm.vllm_multi_process_adapter"
    )
    result = _run(code, folder, {"LMCACHE_SERDE": "turboquant"})
    assert result.returncode == 0, result.stderr
    log = result.stdout + result.stderr
    assert log.count("hands its KV cache to the lmcache server") == int(has_entry_points)
    assert log.count("has no entry point for plugins, so LMCACHE_SERDE does nothing") == int(not has_entry_points)


def test_importing_the_package_is_free_of_lmcache(folder: Path) -> None:
    code = (
        "import sys, tq_offload, tq_offload.codec, tq_offload.integrations.lmcache\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'lmcache', 'prometheus_client')])"
    )
    result = _run(code, folder, {})
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize("count", [1, 2])
def test_a_bad_setting_of_an_adapter_s_serde_stops_the_start_in_one_line(folder: Path, count: int) -> None:
    code = (
        "import tq_offload.integrations.lmcache.activation as a; a.activate_or_exit()\n"
        "from lmcache.v1.distributed.config import parse_args\n"
        'specs = [\'{"type": "fs", "base_path": "x"}\'] * ' + str(count - 1) + "\n"
        'specs += [\'{"type": "fs", "base_path": "x", "serde": {"type": "tq_offload", "bits": 9}}\']\n'
        "args = ['--l1-size-gb', '0.05', '--eviction-policy', 'LRU']\n"
        "parse_args(args + [x for spec in specs for x in ('--l2-adapter', spec)])"
    )
    result = _run(code, folder, {"LMCACHE_SERDE": "turboquant"})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "TQ-Offload: cannot start: serde.bits=9 is not understood; allowed: an integer from 1 to 8"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("setting", ["turboquant", ""])
def test_in_process_mode_gets_its_tiers_from_us_only_with_the_setting(folder: Path, setting: str) -> None:
    code = (
        "import tq_offload.integrations.lmcache.activation as a; a.activate_or_exit(); a.activate_or_exit()\n"
        "import lmcache.v1.storage_backend.storage_manager as m\n"
        "print('ours', hasattr(m.CreateStorageBackends, 'tq_offload_original'))"
    )
    result = _run(code, folder, {"LMCACHE_SERDE": setting})
    assert result.returncode == 0, result.stderr
    assert f"ours {bool(setting)}" in result.stdout
