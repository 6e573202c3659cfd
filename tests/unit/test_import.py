"""Importing is free of side effects and of heavy imports."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

PROBE = """
import json, sys, threading
before = set(sys.modules)
import {module}
print(json.dumps([sorted(set(sys.modules) - before), threading.active_count()]))
"""
OPTIONAL = ("lmcache", "vllm", "kvpress", "redis", "transformers")
HEAVY = ("numba", "llvmlite", "triton")


@pytest.mark.parametrize("module", ["tq_offload", "tq_offload.spec", "tq_offload.errors", "tq_offload.layout"])
def test_the_lowest_layers_do_not_even_import_torch(module: str) -> None:
    loaded, threads = probe(module)
    assert not [m for m in loaded if m.split(".")[0] in ("torch", *OPTIONAL, *HEAVY)]
    assert threads == 1


@pytest.mark.parametrize("module", ["tq_offload.codec", "tq_offload.kernels", "tq_offload.frame"])
def test_the_core_imports_neither_optional_packages_nor_kernels(module: str) -> None:
    loaded, threads = probe(module)
    assert not [m for m in loaded if m.split(".")[0] in (*OPTIONAL, *HEAVY)]
    assert threads == 1


def probe(module: str) -> tuple[list[str], int]:
    out = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module)], capture_output=True, text=True, check=True
    )
    loaded, threads = json.loads(out.stdout)
    return loaded, threads


def test_exported_names_exist() -> None:
    import importlib
    import pkgutil

    import tq_offload

    for info in pkgutil.walk_packages(tq_offload.__path__, "tq_offload."):
        without = {"tq_offload.press": "kvpress", "tq_offload.kernels.triton": "triton"}
        if ".integrations" in info.name or any(
            info.name.startswith(name) and find_spec(package) is None for name, package in without.items()
        ):
            continue  # other tests import these, each in its own environment
        module = importlib.import_module(info.name)
        for name in getattr(module, "__all__", []):
            assert hasattr(module, name), f"{info.name}.{name}"
