"""What bench_model says: tables, checks, results file; from that file plot and section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.table import Table

from benchmarks import planner_ttft_report
from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.planner import LINKS, CodecRate, break_even, load_seconds
from benchmarks.planner_ttft_report import Against
from benchmarks.samples import Check, Quantiles, axes, host_line, rich_table, write_results

__all__ = ["Plan", "Sized", "checks", "plots", "section", "tables", "write"]

_GBIT = 1e9 / 8
MIN_FEWER = 3.7


class Sized(Protocol):
    """A model: `planner.Model`, or what a results file says of one."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def head_dim(self) -> int:
        """Elements of a vector."""

    @property
    def raw_bytes(self) -> int:
        """Bytes a token as they are."""

    def frame_bytes(self) -> float:
        """Bytes a token in our frames."""


@dataclass(frozen=True)
class _Read:
    """A model of a results file; `head_dim` is its number there, which names its rates."""

    name: str
    head_dim: int
    raw_bytes: int
    nbytes: float

    def frame_bytes(self) -> float:
        return self.nbytes


@dataclass(frozen=True)
class Plan:
    """What is planned: models, decoding by size of the vectors, lengths of the prefix, threads."""

    models: Sequence[Sized]
    rates: Mapping[int, CodecRate]
    tokens: Sequence[int]
    threads: Sequence[int]

    def rate(self, model: Sized, threads: int) -> float:
        """Bytes of uncompressed KV decoded a second."""
        return self.rates[model.head_dim].rate(threads)

    def break_even(self, model: Sized, threads: int) -> float:
        """Bytes a second of the link below which packed loads sooner."""
        return break_even(model.raw_bytes, model.frame_bytes(), self.rate(model, threads))

    def loads(self, model: Sized, tokens: int, link: float, threads: int) -> tuple[float, float]:
        """Seconds to load a prefix as it is, and packed."""
        raw, stored = tokens * model.raw_bytes, tokens * model.frame_bytes()
        return load_seconds(raw, raw, link), load_seconds(raw, stored, link, self.rate(model, threads))


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _model_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    heads = ["model", "bf16, bytes a token", "packed", "fewer", *(f"break-even, {n} thr." for n in plan.threads)]
    rows = []
    for model in plan.models:
        row = [model.name, f"{model.raw_bytes:,}", f"{model.frame_bytes():,.0f}"]
        row.append(f"{model.raw_bytes / model.frame_bytes():.2f}×")
        for count in plan.threads:
            mark = "" if plan.rates[model.head_dim].measured(count) else "~"
            row.append(f"{mark}{plan.break_even(model, count) / _GBIT:.3g} Gbit/s")
        rows.append(row)
    return heads, rows


def _load_rows(plan: Plan, tokens: int, threads: int) -> tuple[list[str], list[list[str]]]:
    heads = ["model", *LINKS]
    rows = []
    for model in plan.models:
        row = [model.name]
        for link in LINKS.values():
            naive, packed = plan.loads(model, tokens, link, threads)
            row.append(f"{_seconds(naive)} / {_seconds(packed)} ({naive / packed:.2f}×)")
        rows.append(row)
    return heads, rows


def shown_threads(plan: Plan) -> int:
    """The number of threads that the tables of seconds are for: 8, or the largest below."""
    return max((n for n in plan.threads if n <= 8), default=min(plan.threads))


def tables(plan: Plan) -> list[Table]:
    """For a terminal."""
    heads, rows = _model_rows(plan)
    out = [rich_table("Bytes a token, and the link below which packed loads sooner (~: scaled)", heads, rows)]
    count = shown_threads(plan)
    for tokens in plan.tokens:
        title = f"Seconds to load {tokens:,} tokens, bf16 / packed, {count} threads decode"
        out.append(rich_table(title, *_load_rows(plan, tokens, count)))
    return out


def checks(plan: Plan) -> list[Check]:
    """What must hold of the sizes."""
    worst = min(plan.models, key=lambda m: m.raw_bytes / m.frame_bytes())
    fewer = worst.raw_bytes / worst.frame_bytes()
    return [Check(f"every model: {MIN_FEWER}x fewer bytes", fewer >= MIN_FEWER, f"{fewer:.2f}x ({worst.name})")]


def write(
    plan: Plan, samples: Mapping[int, Mapping[int, Quantiles]], against: Against | None, held: Sequence[Check]
) -> None:
    """Write benchmarks/results/model.json and .csv; ``held`` has the checks of the plan and of ``against``."""
    rows = []
    for model in plan.models:
        for count in plan.threads:
            rate = plan.rates[model.head_dim]
            common: dict[str, Any] = {
                "model": model.name, "threads": count, "decode_GBs": rate.rate(count) / 1e9,
                "decode_measured": rate.measured(count), "decode_source": rate.source,
                "raw_bytes_per_token": model.raw_bytes, "frame_bytes_per_token": model.frame_bytes(),
                "break_even_gbit": plan.break_even(model, count) / _GBIT,
                "break_even_overlapped_gbit": rate.rate(count) / _GBIT,
            }  # fmt: skip
            for tokens in plan.tokens:
                for link, speed in LINKS.items():
                    naive, packed = plan.loads(model, tokens, speed, count)
                    times = {"naive_s": float(f"{naive:.5g}"), "packed_s": float(f"{packed:.5g}")}
                    rows.append({**common, "tokens": tokens, "link": link, **times})
    measured = {
        str(dim): {str(n): {k: v / 1e9 for k, v in asdict(q).items()} for n, q in found.items()}
        for dim, found in samples.items()
    }
    content = {
        "decode_GBs_by_head_dim_and_threads": measured,
        "checks": [asdict(one) for one in held],
        "against_ttft": planner_ttft_report.as_json(against) if against else None,
    }
    write_results("model", content, rows)


def _read(results: Mapping[str, Any]) -> Plan:
    """The plan of a results file. Each model has its own rates: those that were measured."""
    rows = results["rows"]
    models, rates = [], {}
    for number, name in enumerate(dict.fromkeys(row["model"] for row in rows)):
        of = [row for row in rows if row["model"] == name]
        models.append(_Read(name, number, of[0]["raw_bytes_per_token"], of[0]["frame_bytes_per_token"]))
        measured = {row["threads"]: row["decode_GBs"] * 1e9 for row in of if row["decode_measured"]}
        rates[number] = CodecRate(measured, of[0]["decode_source"])
    tokens, threads = (list(dict.fromkeys(row[what] for row in rows)) for what in ("tokens", "threads"))
    return Plan(models, rates, tokens, threads)


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """The gain against the speed of the link, of the first and the last model."""
    plan = _read(files["model"])
    figure, (left,) = axes(7, 4)
    speeds = [0.1 * 10 ** (i / 20) for i in range(61)]  # Gbit/s
    for model, colour in ((plan.models[0], "#0b6e4f"), (plan.models[-1], "#c2571a")):
        for count, style in zip([n for n in (1, 8) if n in plan.threads], ("--", "-"), strict=False):
            gains = [naive / packed for naive, packed in (plan.loads(model, 1, s * _GBIT, count) for s in speeds)]
            left.plot(speeds, gains, style, color=colour, label=f"{model.name}, ×{count} threads")
    left.axhline(1, color="#5b6770", linewidth=0.8)
    left.set(xscale="log", xlabel="link, Gbit/s", ylabel="bf16's load time / packed", ylim=(0, 4))
    left.legend(frameon=False)
    return {"transfer-break-even": figure}


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["model"]
    plan, measured = _read(results), results["decode_GBs_by_head_dim_and_threads"]
    count = shown_threads(plan)
    rates = "; ".join(
        f"vectors of {dim}: " + ", ".join(f"×{n} {Quantiles(**q)}" for n, q in found.items())
        for dim, found in measured.items()
    )
    lines = [
        "## Which link, which model: `make bench-model`", "",
        paragraph(
            "A calculation, not a measurement of a deployment: decoding as measured here (median, 20th–80th",
            "percentile), sizes of whole frames of 256 tokens, speeds of links as they are called. Reading and",
            "decoding are added; a deployment that does both at once gains more. Break-even: below that speed of the",
            "link packed loads sooner. ~: rates of the most threads measured, scaled in proportion.",
        ), "",
        paragraph(f"Decoding, GB/s of uncompressed bf16 (× threads): {rates or 'from a file of bench_codec'}."), "",
        *markdown_table(*_model_rows(plan)), "",
    ]  # fmt: skip
    for tokens in plan.tokens:
        title = f"Seconds to load {tokens:,} tokens, bf16 / packed (bf16's time over packed's), {count} threads decode:"
        lines += [title, "", *markdown_table(*_load_rows(plan, tokens, count)), ""]
    lines += ["![Gain against the speed of the link](transfer-break-even.svg)", ""]
    if results.get("against_ttft"):
        lines += planner_ttft_report.markdown(planner_ttft_report.read(results))
    return "\n".join([*lines, host_line(results)])
