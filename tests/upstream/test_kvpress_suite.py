"""kvpress's own tests, with our classes where a run wants them: exactly what is explained here may fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import sdist  # noqa: E402

PACK_ALL = {"sink_tokens": 0, "window": 0}
PRESSES = ("tests/presses/test_presses.py", "tests/test_decoding_compression.py")
# What cannot pass on this machine, whatever is packed.
NO_NETWORK = "asks the hub or GitHub for a list or file"
BASELINE = {
    "tests.presses.test_duo_attention_press::test_load_attention_pattern": NO_NETWORK,
    "tests.presses.test_ea_with_stats::test_load_stats": NO_NETWORK,
    "tests.presses.test_qfilters_press::test_load_qfilters": NO_NETWORK,
    "tests.test_pipeline::test_pipeline_answer_is_correct": "needs the trained weights of h2o-danube3",
    "tests.test_pipeline::test_pipeline_with_quantized_cache": "needs the trained weights of h2o-danube3",
    "tests.presses.test_block_press::test_block_press_is_streaming_top_k": "fails without us too: stand-in model",
}
LOSSY = {"tests.presses.test_presses::test_presses_keep_highest_score": "read-back keys against exact scores"}
# A press with a context of its own refuses to run inside ComposedPress. kvpress's test leaves out KVzip, FastKVzip and
# KVCompose there by their class, which it does not see inside ours.
OWN_CONTEXT = {
    f"tests.presses.test_presses::test_presses_run[ComposedPress-press_dict{n}]": f"{name} needs a context of its own"
    for n, name in ((14, "KVzip"), (15, "KVgrad"), (16, "RestoreKV"), (17, "FastKVzip"), (23, "KVCompose"))
}
# Counts hooks: one where there are three.
HOOKS = {
    "tests.test_press_call::test_context_manager_adds_and_removes_hook": "it wants one hook a layer, we have three"
}


class Run(NamedTuple):
    """One run: what of ours it puts where, which tests, what fails and why, and how many must pass and pack."""

    mode: str
    settings: dict[str, int]
    tests: tuple[str, ...]
    failing: dict[str, str]
    passed: int
    packing: int


RUNS = {
    "every-cache": Run("every-cache", PACK_ALL, ("tests",), BASELINE | LOSSY, 657, 290),
    "our-press": Run("our-press", {}, PRESSES, {}, 439, 7),
    "default-presses": Run("default-presses", PACK_ALL, PRESSES, OWN_CONTEXT, 338, 24),
}
if os.environ.get("TQ_TEST_ALL_KVPRESS") == "1":
    RUNS |= {
        "baseline": Run("baseline", {}, ("tests",), BASELINE, 658, 0),
        "every-cache-defaults": Run("every-cache", {}, ("tests",), BASELINE | LOSSY, 657, 1),
        "every-press": Run("every-press", PACK_ALL, ("tests",), BASELINE | LOSSY | HOOKS, 655, 1),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked tests, and beside them the stand-ins."""
    base = tmp_path_factory.mktemp("kvpress")
    make = "import pathlib, sys, stand_ins; stand_ins.make_hub(pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(HERE)}  # a process of its own: importing kvpress warns
    subprocess.run([sys.executable, "-c", make, str(base / "hub")], env=env, check=True, capture_output=True)
    return sdist.unpack(base)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_kvpress_suite(name: str, folder: Path) -> None:
    run = RUNS[name]
    report = folder / f"{name}.xml"
    told = json.dumps({"mode": run.mode, "settings": run.settings})
    env = {
        **os.environ, "HF_HOME": str(folder.parent / "hub"), "HF_HUB_OFFLINE": "1", "TQ_UPSTREAM": told,
        "PYTHONPATH": str(HERE),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-q", "-n", "2", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, "--timeout", "120", "--junitxml", str(report), *run.tests],
        env=env, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert report.exists(), result.stdout[-3000:] + result.stderr[-3000:]
    failed, passed, packing = {}, 0, 0
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [x.get("message", "") for x in case if x.tag in ("failure", "error")]
        if bad:
            failed[f"{case.get('classname')}::{case.get('name')}"] = bad[0][:500]
        passed += not bad and case.find("skipped") is None
        packing += any(p.get("name") == "packed" and p.get("value") != "0" for p in case.iter("property"))
    assert failed.keys() == run.failing.keys(), {n: failed.get(n, "passes") for n in failed.keys() ^ run.failing.keys()}
    assert passed >= run.passed
    assert packing >= run.packing
