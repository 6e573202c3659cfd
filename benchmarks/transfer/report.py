"""What bench_transfer says: table, checks, results file; from that file plot and section of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table

from benchmarks.doc_sections import markdown_table, paragraph
from benchmarks.samples import Check, Quantiles, axes, check_lines, host_line, rich_table, write_results
from benchmarks.transfer.chunks import Shape
from benchmarks.transfer.measure import Row

__all__ = ["Run", "Say", "checks", "plots", "readme", "section", "table", "write"]

Say = Callable[[str], None]
MIN_FEWER, MIN_GETS, MIN_PUTS = 3.7, 1.0, 0.7
_QUANTILES = ("put", "get", "put_ratio", "get_ratio")
OURS, WORKERS = "TQ-Offload", 2  # as many as FrameStore has
HEADS = (
    "place", "way", "workers", "put GB/s", "get GB/s", "put / naive", "get / naive", "stored, fewer", "wire, puts",
    "wire, gets", "CPU s/GB put", "CPU s/GB get",
)  # fmt: skip
COLOURS = {"naive": "#5b6770", "LMCache naive": "#7d64a8", "LMCache fp8": "#c2571a", OURS: "#0b6e4f"}


@dataclass(frozen=True)
class Run:
    """What was run: chunks of that shape, rounds, seconds, load average of the machine before and after."""

    shape: Shape
    chunks: int
    rounds: int
    seconds: float
    load: tuple[float, float]
    redis: str


def checks(rows: Sequence[Row]) -> list[Check]:
    """What must hold of our rows, where they were run. Rates: medians of the rounds, with as many workers."""
    out = []
    ours = [row for row in rows if row.way == OURS and row.workers == WORKERS]
    for row in ours:
        base = _naive(rows, row.place)
        fewer = {"stored": base.held / row.held}
        if row.sent:
            fewer |= {"on the wire in puts": base.sent / row.sent, "on the wire in gets": base.received / row.received}
        for what, ratio in fewer.items():
            name = f"{row.place}: at least {MIN_FEWER}x fewer bytes {what}"
            out.append(Check(name, ratio >= MIN_FEWER, f"{ratio:.2f}x"))
    floors = [
        ("gets", "disk, device", MIN_GETS), ("gets", "redis, loopback", MIN_GETS),
        ("gets", "redis, 1 Gbit/s", MIN_GETS),
        ("puts", "disk, page cache", MIN_PUTS), ("puts", "redis, loopback", MIN_PUTS),
    ]  # fmt: skip
    for what, place, floor in floors:
        for row in rows:
            if (row.place, row.way) == (place, OURS) and row.workers == (1 if place == "redis, 1 Gbit/s" else WORKERS):
                ratio = row.get_ratio if what == "gets" else row.put_ratio
                one = next(r for r in rows if (r.place, r.way, r.workers) == (place, OURS, 1))
                alone = one.get_alone if what == "gets" else one.put_alone
                name = f"{place}: {what} at least {floor}x naive's, both ×{row.workers}"
                out.append(Check(name, ratio.p50 >= floor, f"{ratio}x{_less_waiting(alone)}"))
    return out


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's cells; CPU is this process + the server."""
    out = []
    for row in rows:
        base = _naive(rows, row.place)
        out.append(
            [
                row.place, row.way, str(row.workers), str(row.put), str(row.get),
                _ratio(row.put_ratio.p50, row.put_alone), _ratio(row.get_ratio.p50, row.get_alone),
                _fewer(base.held, row.held), _fewer(base.sent, row.sent), _fewer(base.received, row.received),
                f"{row.put_cpu:.2f} + {row.put_server_cpu:.2f}", f"{row.get_cpu:.2f} + {row.get_server_cpu:.2f}",
            ]
        )  # fmt: skip
    return out


def table(rows: Sequence[Row], run: Run) -> Table:
    """The table for a terminal."""
    return rich_table(_title(run), HEADS, cells(rows), texts=2)


def write(rows: Sequence[Row], held: Sequence[Check], run: Run) -> None:
    """Write benchmarks/results/transfer.json and .csv."""
    flat: list[dict[str, Any]] = []
    for row in rows:
        quantiles = {name: getattr(row, name) for name in _QUANTILES}
        flat.append({**asdict(row), **{name: asdict(q) for name, q in quantiles.items()}, "model": run.shape.model})
    write_results("transfer", {"run": asdict(run), "checks": [asdict(one) for one in held]}, flat)


def _read(results: Mapping[str, Any]) -> tuple[list[Row], Run]:
    """The rows and the run of a results file."""
    rows = []
    for row in results["rows"]:
        values = {field.name: row[field.name] for field in fields(Row)}
        rows.append(Row(**{**values, **{name: Quantiles(**values[name]) for name in _QUANTILES}}))
    run = results["run"]
    return rows, Run(**{**run, "shape": Shape(**run["shape"]), "load": tuple(run["load"])})


def plots(files: Mapping[str, Any]) -> dict[str, Any]:
    """Rates by place and way."""
    rows, _ = _read(files["transfer"])
    figure, (left, right) = axes(10, 4.5, columns=2)
    places = list(dict.fromkeys(row.place for row in rows))
    bars = [("naive", 1), ("naive", 2), ("LMCache naive", 1), ("LMCache fp8", 1), (OURS, 1), (OURS, 2)]
    height = 0.8 / len(bars)
    for one, what in ((left, "put"), (right, "get")):
        for index, (way, workers) in enumerate(bars):
            found = [row for row in rows if (row.way, row.workers) == (way, workers)]
            rates = [getattr(row, what) for row in found]
            one.barh(
                [places.index(row.place) + (index - (len(bars) - 1) / 2) * height for row in found],
                [q.p50 for q in rates], height, color=COLOURS[way], alpha=0.6 if workers == 2 else 1,
                xerr=[[q.p50 - q.p20 for q in rates], [q.p80 - q.p50 for q in rates]],
                label=f"{way} ×{workers}", error_kw={"linewidth": 0.7},
            )  # fmt: skip
        one.set_yticks(range(len(places)), places if one is left else [""] * len(places))
        one.invert_yaxis()
        one.set(xlabel=f"{what}s, GB/s of uncompressed KV")
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside lower center", ncols=len(bars), frameon=False, fontsize=8
    )
    return {"transfer-rates": figure}


def section(files: Mapping[str, Any]) -> str:
    """The section of docs/benchmarks.md."""
    results = files["transfer"]
    rows, run = _read(results)
    lines = [
        "## Puts and gets: `make bench-transfer`", "",
        paragraph(
            f"{_title(run)}, the real stores of this package, an own redis-server on loopback. GB/s of uncompressed",
            "bf16 KV: median (20th to 80th percentile) of the rounds; every round takes every way to every place, and",
            "ratios are within a round, against naive with as many workers. Naive: the chunk's bytes through the same",
            "stores, read straight into the tensor. LMCache naive: LMCache's own RedisConnector and FSConnector over",
            "its own memory, all chunks at once. LMCache fp8: its serde class, through the same stores. TQ-Offload:",
            "frames, bound to their keys and checked. Stored: bytes of values (memory), allocated blocks (disk),",
            "`MEMORY USAGE` (Redis); wire: Redis's `total_net_input_bytes` and `total_net_output_bytes`; each is",
            "naive's over the row's. CPU: seconds a GB of this process + of redis-server. Page cache: no fsync, reads",
            "from memory. Device: fdatasync with every put, pages dropped before the gets. 1 Gbit/s: through a",
            "forwarder that keeps to that rate in each direction. In square brackets, for one worker: of the times",
            "less what it waited for a core that another process had (run delay in `/proc/self/task/*/schedstat`).",
        ), "",
        *markdown_table(HEADS, cells(rows)), "",
        "![Rates by place and way](transfer-rates.svg)", "",
        paragraph(
            "Where nothing but a copy in memory stands between the chunk and the store (memory, page cache), naive is",
            f"as fast as that copy, and packing costs time for its bytes: gets are {_copied(rows)}.",
        ), "",
        *check_lines(results["checks"]), "",
        paragraph(
            f"{run.seconds:.0f} s; load average {run.load[0]:.1f} before, {run.load[1]:.1f} after: what other",
            f"processes take of the cores slows encoding and decoding, and not the device. redis-server {run.redis}.",
        ),
        host_line(results),
    ]  # fmt: skip
    return "\n".join(lines)


def readme(files: Mapping[str, Any]) -> dict[str, str]:
    """The table of README.md: our rates with two workers where there are two, and naive's with as many."""
    rows, run = _read(files["transfer"])
    cells = []
    for place in dict.fromkeys(row.place for row in rows):
        workers = max(row.workers for row in rows if (row.place, row.way) == (place, OURS))
        naive, ours = (
            next(r for r in rows if (r.place, r.way, r.workers) == (place, w, workers)) for w in ("naive", OURS)
        )
        rates = [f"{row.put.p50:.2f} / {row.get.p50:.2f}" for row in (naive, ours)]
        times = f"{ours.put_ratio.p50:.2f}× / {ours.get_ratio.p50:.2f}×"
        cells.append([place, str(workers), *rates, times, _fewer(naive.held, ours.held)])
    text = [
        paragraph(
            f"Through the stores, puts / gets in GB/s of uncompressed bf16 ({run.shape.model}, chunks of",
            f"{run.shape.tokens} tokens; `make bench-transfer`; ratios are medians within rounds):",
        ), "",
        *markdown_table(("place", "workers", "naive", OURS, "times naive", "fewer bytes stored"), cells),
    ]  # fmt: skip
    return {"transfer": "\n".join(text)}


def _copied(rows: Sequence[Row]) -> str:
    """Our gets where naive's are a copy in memory."""
    found = [row for row in rows if row.way == OURS and row.place in ("memory", "disk, page cache")]
    return ", ".join(
        f"{row.get_ratio.p50:.2f}× naive's from {row.place.split(', ')[-1]} (×{row.workers})" for row in found
    )


def _title(run: Run) -> str:
    shape = run.shape
    size = f"{shape.layers} layers, {shape.heads} heads of {shape.head_dim}, {shape.nbytes:,} bytes each"
    return f"{run.chunks} chunks of {shape.tokens} tokens, {shape.model} ({size}), {run.rounds} rounds"


def _naive(rows: Sequence[Row], place: str) -> Row:
    return next(row for row in rows if row.place == place and row.way == "naive" and row.workers == 1)


def _ratio(measured: float, alone: float) -> str:
    return f"{measured:.2f}× [{alone:.2f}×]" if alone else f"{measured:.2f}×"


def _less_waiting(alone: float) -> str:
    return f"; ×1 without its wait for a core {alone:.2f}x" if alone else ""


def _fewer(base: int, nbytes: int) -> str:
    return f"{base / nbytes:.2f}×" if nbytes else ""
