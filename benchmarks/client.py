"""What is asked of running servers: completions with their time to first token, metrics, clearing L1, bytes on disk."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.process import DeploymentError, Progress, local_http, silent

__all__ = [
    "Completion",
    "StoredFiles",
    "complete",
    "post_json",
    "scrape",
    "scrape_samples",
    "stored_files",
    "tier_samples",
    "wait_until_stored",
]


@dataclass(frozen=True)
class Completion:
    """One answer: its text, seconds to the first and to the last streamed token, and how many tokens the prompt had."""

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int


@dataclass(frozen=True)
class StoredFiles:
    """The cache files in a folder: how many, and the sum of their sizes (st_size) in bytes."""

    count: int
    bytes: int


def complete(url: str, prompt: str, *, model: str, max_tokens: int = 24, timeout_s: float = 180.0) -> Completion:
    """Complete ``prompt`` greedily over ``url``/v1/completions, streamed.

    The time to first token runs from sending the request to the arrival of the first chunk that carries a choice.
    Raises DeploymentError when the engine refuses, stops answering, or ends the stream without a token.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = _request(f"{url}/v1/completions", body)
    pieces: list[str] = []
    ttft, prompt_tokens = None, 0
    began = time.perf_counter()
    try:
        with local_http.open(request, timeout=timeout_s) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if event.get("choices"):
                    ttft = ttft or time.perf_counter() - began
                    pieces.append(event["choices"][0]["text"])
                if event.get("usage"):
                    prompt_tokens = int(event["usage"]["prompt_tokens"])
    except urllib.error.HTTPError as error:
        raise DeploymentError(f"the engine refused the completion: {error.read().decode()[:500]}", _SEE_LOG) from error
    except OSError as error:
        raise DeploymentError(f"the engine did not finish the completion: {error}", _SEE_LOG) from error
    if ttft is None:
        raise DeploymentError("the engine ended the completion without a token", _SEE_LOG)
    return Completion("".join(pieces), ttft, time.perf_counter() - began, prompt_tokens)


def post_json(url: str, body: object, timeout_s: float = 30.0) -> object:
    """POST ``body`` as JSON and return the JSON reply. Raises DeploymentError when the server does not accept it."""
    try:
        with local_http.open(_request(url, body), timeout=timeout_s) as reply:
            answer: object = json.load(reply)
            return answer
    except OSError as error:
        raise DeploymentError(f"POST {url} failed: {error}", _SEE_LOG) from error


def scrape(url: str, timeout_s: float = 30.0) -> dict[str, float]:
    """Return every sample of a Prometheus page, summed over its labels. Raises DeploymentError when there is none."""
    sums: dict[str, float] = {}
    for sample in scrape_samples(url, timeout_s):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def scrape_samples(url: str, timeout_s: float = 30.0) -> list[Sample]:
    """Return every sample of a Prometheus page. Raises DeploymentError when there is none."""
    try:
        with local_http.open(url, timeout=timeout_s) as reply:
            page = reply.read().decode()
    except OSError as error:
        raise DeploymentError(f"no metrics at {url}: {error}", _SEE_LOG) from error
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def tier_samples(url: str, timeout_s: float = 30.0) -> dict[tuple[str, str], float]:
    """Return every sample of a Prometheus page by its name and its label `tier` ("" without), summed over the rest."""
    sums: dict[tuple[str, str], float] = {}
    for sample in scrape_samples(url, timeout_s):
        key = (sample.name, sample.labels.get("tier", ""))
        sums[key] = sums.get(key, 0.0) + sample.value
    return sums


def stored_files(folder: Path, pattern: str = "*.data") -> StoredFiles:
    """Return what lies in ``folder`` and below; files still being written (other suffixes) do not count."""
    sizes = [path.stat().st_size for path in folder.rglob(pattern) if path.is_file()]
    return StoredFiles(len(sizes), sum(sizes))


def wait_until_stored(
    folder: Path,
    count: int,
    *,
    timeout_s: float = 60.0,
    still_s: float = 0.8,
    progress: Progress = silent,
) -> StoredFiles:
    """Wait until ``folder`` holds at least ``count`` cache files and has not changed for ``still_s`` seconds.

    Stores are asynchronous: a completion returns before its chunks are on disk. Raises DeploymentError at the time-out.
    """
    began = changed = time.monotonic()
    seen = stored_files(folder)
    while seen.count < count or time.monotonic() - changed < still_s:
        elapsed = time.monotonic() - began
        progress(f"waiting for {count} chunks on disk ({seen.count} there)", elapsed)
        if elapsed > timeout_s:
            what = f"only {seen.count} of {count} chunks were on disk after {elapsed:.0f} s"
            raise DeploymentError(what, "look for a refused store in the log of the LMCache server")
        time.sleep(0.1)
        now = stored_files(folder)
        if now != seen:
            seen, changed = now, time.monotonic()
    return seen


_SEE_LOG = "read the logs of the engine and of the LMCache server; --keep keeps them"


def _request(url: str, body: object) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
