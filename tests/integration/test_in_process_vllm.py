"""LMCache inside a real vLLM; tiers in RAM, on disk and in Redis; `LMCACHE_SERDE=turboquant`: bytes, hits, restart."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from benchmarks.tier_runs import Held, TierRun

CHUNKS, CHUNK_TOKENS, BYTES_PER_TOKEN = 6, 256, 30 * 2 * 3 * 64 * 2  # SmolLM2-135M: layers, K and V, heads, dim, bf16

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TierRun:
    """One engine with all tiers, restarted once: 3 to 5 minutes."""
    from rich.console import Console

    from benchmarks import tier_modes
    from benchmarks.model import prepare_model
    from benchmarks.steps import Steps
    from benchmarks.tier_runs import STEPS, Plan
    from benchmarks.tiers import prompt

    plan = Plan(prepare_model(), prompt(), tmp_path_factory.mktemp("tiers"))
    return tier_modes.run("in-process", "turboquant", plan, Steps(Console(), STEPS["in-process"]["turboquant"]))


@pytest.fixture(scope="module")
def uncompressed(run: TierRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Held]:
    from benchmarks.deployment import RedisServer
    from benchmarks.tier_report import uncompressed

    with RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        return uncompressed(run, BYTES_PER_TOKEN, redis)


@pytest.mark.parametrize("tier", ["ram", "disk", "redis"])
def test_holds_at_least_3_7_times_fewer_bytes(run: TierRun, uncompressed: dict[str, Held], tier: str) -> None:
    assert (run.held[tier].entries or 0) >= CHUNKS
    assert uncompressed[tier].bytes / run.held[tier].bytes >= 3.7


def test_repeated_prompt_is_hit_in_ram(run: TierRun) -> None:
    assert run.chunks == CHUNKS
    hit = run.hits["ram"]
    assert hit.tokens == CHUNKS * CHUNK_TOKENS
    assert hit.served == {"ram": CHUNKS, "disk": 0, "redis": 0}
    assert hit.answer.text
    assert hit.answer.ttft_s < run.cold.ttft_s / 4


@pytest.mark.parametrize("tier", ["disk", "redis"])
def test_prompt_is_hit_after_a_restart(run: TierRun, tier: str) -> None:
    hit = run.after_restart[tier]
    assert hit.tokens == CHUNKS * CHUNK_TOKENS
    assert hit.served == {other: CHUNKS if other == tier else 0 for other in ("ram", "disk", "redis")}
    assert hit.answer.text


def test_log_names_every_tier_once(run: TierRun) -> None:
    assert run.start_up_lines == {"ram": 1, "disk": 1, "redis": 1}


def test_memory_grows_by_frames_alone(run: TierRun) -> None:
    assert run.pool == 0  # no uncompressed chunk is left in LMCache's memory
    assert run.growth_per_prompt <= CHUNKS * CHUNK_TOKENS * BYTES_PER_TOKEN / 3.5
