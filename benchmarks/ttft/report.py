"""What bench_ttft says: tables, results file; from that file plots, section of docs/benchmarks.md, README's table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import Check, cores, host_line, rich_table, write_results
from benchmarks.ttft.checks import by_way, ratio
from benchmarks.ttft.link import Rate
from benchmarks.ttft.measure import Hits, Run, rate_name
from benchmarks.ttft.plots import draw
from benchmarks.ttft.ways import Way

__all__ = ["Result", "plots", "readme", "section", "tables", "write"]

_PAIRS = (("naive", "turboquant"), ("mp-naive", "mp-turboquant"), ("mp-fp8", "mp-turboquant"), ("mp-fp8", "turboquant"))
_COMMAND = "make bench-ttft"


@dataclass(frozen=True)
class Result:
    """Everything of a run: runs by way, ways that failed and why, measured Mbit/s by rate, and how it was shaped."""

    runs: Mapping[str, Sequence[Run]]
    failed: Mapping[str, str]
    link: Mapping[Rate, float]
    how: str
    checks: Sequence[Check]
    seconds: float

    @property
    def places(self) -> list[str]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(place for run in self._all() for place in run.hits))

    def _all(self) -> Iterable[Run]:
        return (run for found in self.runs.values() for run in found)


def tables(result: Result) -> list[Table]:
    """For a terminal."""
    out = [
        rich_table(f"The link to Redis: {result.how}", *_link(result)),
        rich_table("Time to first token in seconds, median (min–max)", *_times(result), texts=2),
    ]
    heads, rows = _ratios(result)
    if not rows:
        return out
    return [*out, rich_table("Redis: how many times sooner than; loading alone in brackets", heads, rows, texts=2)]


def write(result: Result) -> None:
    """Write benchmarks/results/ttft.json and .csv."""
    rows = [row for found in result.runs.values() for run in found for row in _flat(run)]
    content = {
        "link": {"how": result.how, "measured_mbit": {rate_name(rate): seen for rate, seen in result.link.items()}},
        "checks": [asdict(check) for check in result.checks],
        "failed": dict(result.failed),
        "seconds": result.seconds,
        "runs": {name: [asdict(run) for run in found] for name, found in result.runs.items()},
    }
    write_results("ttft", content, rows)


def _read(results: Mapping[str, Any]) -> Result:
    """A results file."""
    runs = {name: [_run(one) for one in found] for name, found in results["runs"].items()}
    measured = {_rate(name): seen for name, seen in results["link"]["measured_mbit"].items()}
    held = [Check(**one) for one in results["checks"]]
    return Result(runs, results["failed"], measured, results["link"]["how"], held, results["seconds"])


def _run(found: Mapping[str, Any]) -> Run:
    hits = {place: Hits(**one) for place, one in found["hits"].items()}
    return Run(Way(**found["way"]), found["tokens"], found["cold_s"], Hits(**found["fixed"]), hits)


def _rate(name: str) -> Rate:
    """The inverse of `rate_name`."""
    if name == rate_name(None):
        return None
    number, unit = name.split()
    return float(number) * (1000 if unit.startswith("Gbit") else 1)


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """Hits from Redis over each link, and every place for the longest prompt."""
    return draw(_read(files["ttft"]).runs)


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    return "\n".join([_PREFACE, *_section(_read(files["ttft"]), files["ttft"])])


def readme(files: Mapping[str, Any]) -> dict[str, str]:
    """The table of README.md: the prompt in the middle, every way, medians."""
    result = _read(files["ttft"])
    lengths = sorted({run.tokens for found in result.runs.values() for run in found})
    tokens = lengths[len(lengths) // 2]
    runs = [run for found in result.runs.values() for run in found if run.tokens == tokens]
    naive = {run.way.mode: _sent(run) for run in runs if run.way.serde == "naive"}
    rows = [
        [
            run.way.label, f"{_sent(run) / 1e6:.1f} MB", f"{naive[run.way.mode] / _sent(run):.2f}×",
            f"{run.cold_s:.2f} s", *(f"{run.hits[place].median_s:.2f} s" for place in result.places),
        ]
        for run in runs
    ]  # fmt: skip
    heads = ("", "bytes from Redis", "fewer", "cold", *_place_names(result))
    text = [
        paragraph(
            f"Time to first token of a prompt of {tokens:,} tokens, median, on vLLM and LMCache for real",
            f"(`make bench-ttft`; SmolLM2-135M in bf16, head_dim 64; {files['ttft']['host']['cpu']},",
            f"{cores(files['ttft'])}).",
        ), "",
        *markdown_table(heads, rows),
    ]  # fmt: skip
    return {"ttft": "\n".join(text)}


def _sent(run: Run) -> int:
    """Bytes that a hit gets from Redis."""
    return max((hits.sent for hits in run.hits.values()), default=0)


def _place_names(result: Result) -> list[str]:
    names = {"ram": "CPU RAM", "disk": "disk"}
    return [names.get(place, place.replace("redis", "Redis")) for place in result.places]


def _flat(run: Run) -> Iterable[dict[str, object]]:
    head = {"way": run.way.label, "mode": run.way.mode, "serde": run.way.serde, "prompt_tokens": run.tokens}
    yield {**head, "place": "none (cold)", "repeats": 1, "ttft_s.p50": run.cold_s}
    yield {**head, "place": "vLLM prefix cache", "repeats": len(run.fixed.ttft_s), **_spread(run.fixed.ttft_s)}
    for place, hits in run.hits.items():
        more = {"load_s.p50": run.load_s(place), "hit_tokens": min(hits.tokens), "redis_bytes": hits.sent}
        yield {**head, "place": place, "repeats": len(hits.ttft_s), **_spread(hits.ttft_s), **more}


def _spread(seconds: Sequence[float]) -> dict[str, object]:
    return {"ttft_s.p50": median(seconds), "ttft_s.min": min(seconds), "ttft_s.max": max(seconds)}


def _cell(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


Cells = tuple[list[str], list[list[str]]]


def _link(result: Result) -> Cells:
    rows = [[rate_name(rate), f"{seen:,.1f}"] for rate, seen in result.link.items()]
    return ["link", "a GET of 16 MiB, Mbit/s"], rows


def _times(result: Result) -> Cells:
    """A row for each prompt and way; the last column has what the way reads from Redis."""
    rows = []
    for tokens in sorted({run.tokens for found in result.runs.values() for run in found}):
        for found in result.runs.values():
            for run in (run for run in found if run.tokens == tokens):
                cells = [_cell(run.hits[place].ttft_s) for place in result.places]
                rows.append(
                    [
                        f"{tokens:,}",
                        run.way.label,
                        f"{run.cold_s:.2f}",
                        _cell(run.fixed.ttft_s),
                        *cells,
                        f"{_sent(run) / 1e6:.1f}",
                    ]
                )
    return ["prompt tokens", "way", "cold", "vLLM prefix cache", *_place_names(result), "MB from Redis"], rows


def _ratios(result: Result) -> Cells:
    found, rows = by_way(result.runs), []
    for base, ours in _PAIRS:
        for tokens in sorted({tokens for _, tokens in found}):
            cells = [ratio(found, base, ours, tokens, rate) for rate in result.link]
            if all(cell is None for cell in cells):
                continue
            labels = [found[name, tokens].way.label for name in (ours, base)]
            rows.append([*labels, f"{tokens:,}", *(str(cell or "") for cell in cells)])
    return ["way", "than", "prompt tokens", *(rate_name(rate) for rate in result.link)], rows


_PREFACE = f"""## Time to first token (`{_COMMAND}`)

vLLM and LMCache on CPU, SmolLM2-135M in bf16 (30 layers, 3 KV heads of 64; 23,040 bytes of KV cache a token), one
engine for each way. Prompts are whole chunks of 256 tokens and one token more. Each is sent once cold, with the link
unshaped, until every tier has all of it; then several times from each tier, with vLLM's prefix cache and the tiers
before that one emptied or bypassed. Redis runs on this machine; the link in between is shaped each way. Files lie in
the page cache.

*vLLM prefix cache* is what every hit pays whatever it loads: the request, LMCache's lookup, one forward pass over one
token. It is measured twice after each hit from CPU RAM; *loading alone* is a time less the median of these. CPU RAM
holds frames with TQ-Offload in-process, and KV cache as it is in the others (LMCache's L1 in multi-process mode)."""


def _section(result: Result, results: Mapping[str, Any]) -> list[str]:
    out = ["", f"{host_line(results)} Link: {result.how}. The run took {result.seconds / 60:.1f} minutes.", ""]
    out += markdown_table(*_link(result))
    out += ["", "Seconds to the first token, median (min–max):", "", *markdown_table(*_times(result))]
    out += ["", "From Redis, how many times sooner than the other way; loading alone in brackets:", ""]
    out += [*markdown_table(*_ratios(result)), ""]
    out += ["![ttft-redis](ttft-redis.svg)", "![ttft-places](ttft-places.svg)"]
    out += ["", "| check | seen | |", "|---|---|---|"]
    out += [f"| {one.name} | {one.seen} | {'met' if one.passed else '**missed**'} |" for one in result.checks]
    out += [f"\n{name} could not be run: {why}" for name, why in result.failed.items()]
    return [
        *out,
        "",
        "Raw figures: [ttft.json](../benchmarks/results/ttft.json), [ttft.csv](../benchmarks/results/ttft.csv).",
    ]
