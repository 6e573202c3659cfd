"""Damage a cache on a real deployment: the request is answered by recomputing, each damaged file is a counted miss."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client import Completion, scrape_samples
from benchmarks.deployment import LMCacheServer, VLLMEngine
from benchmarks.process import DeploymentError
from benchmarks.samples import ROOT

__all__ = ["EXPECTED_REASONS", "Faults", "damage", "run_faults"]

EXPECTED_REASONS = {"checksum": 1, "not_loaded": 1, "magic": 1}
"""What one flipped byte, one truncated file and one foreign file are counted as."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MISSES = "tq_offload_misses_total"


@dataclass(frozen=True)
class Faults:
    """What was seen after the damage. `misses` by reason, `log_lines` of the server that name a miss."""

    misses: dict[str, int]
    log_lines: list[str]
    hit_tokens: int
    answer: Completion
    healthy: bool


def damage(folder: Path) -> None:
    """Flip a byte in one cache file, truncate a second, and put foreign bytes of the same length into a third.

    Raises DeploymentError when there are fewer than three files.
    """
    files = sorted(folder.rglob("*.data"))
    if len(files) < 3:
        raise DeploymentError(f"{len(files)} cache files in {folder}; three are needed", "use a longer prompt")
    flipped = bytearray(files[0].read_bytes())
    flipped[len(flipped) // 2] ^= 0x10
    files[0].write_bytes(flipped)
    files[1].write_bytes(files[1].read_bytes()[:-1000])
    files[2].write_bytes((b"PK\x03\x04 this is not a cache entry " * (len(flipped) // 30 + 1))[: len(flipped)])


def run_faults(server: LMCacheServer, engine: VLLMEngine, disk: Path, prompt: str, max_tokens: int) -> Faults:
    """Damage three files, empty L1 and ask for the prompt again. Raises DeploymentError when a process died."""
    damage(disk)
    server.clear_l1()
    before, hits = _misses(server), engine.hit_tokens()
    answer = engine.complete(prompt, max_tokens=max_tokens, timeout_s=600)
    server.check_alive()
    engine.check_alive()
    after = _misses(server)
    text = _COLOURS.sub("", server.log.read_text(errors="replace")).replace(f"{ROOT}/", "")
    lines = [line for line in text.splitlines() if "TQ-Offload: miss, reason" in line]
    return Faults(
        {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)},
        lines,
        engine.hit_tokens() - hits,
        answer,
        engine.complete("The capital of France is", max_tokens=4).text != "",
    )


def _misses(server: LMCacheServer) -> dict[str, int]:
    samples = scrape_samples(f"{server.http_url}/metrics")
    return {s.labels["reason"]: int(s.value) for s in samples if s.name == _MISSES}
