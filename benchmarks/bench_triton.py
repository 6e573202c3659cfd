"""Encode and decode of chunks on a GPU, in GB/s of uncompressed KV: kernels alone, whole frames, and plain copies.

usage: python -m benchmarks.bench_triton [--json out.json]      needs a CUDA device and triton
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tq_offload.codec import TurboQuantCodec
from tq_offload.frame import make_plan
from tq_offload.kernels import device, stream_params
from tq_offload.kernels.triton import launch
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

# Name: kind, shape, head_dim, spec
CASES: dict[str, tuple[str, tuple[int, ...], int, CodecSpec]] = {
    "K4V4, 8 heads of 128": ("kv_first", (2, 32, 256, 1024), 128, CodecSpec()),
    "K4V4, K and V packed": ("packed", (32, 256, 2048), 128, CodecSpec()),
    "K3V3": ("kv_first", (2, 32, 256, 1024), 128, CodecSpec(3, 3)),
    "K8V4": ("kv_first", (2, 32, 256, 1024), 128, CodecSpec(8, 4)),
    "K4V4, 8 outlier channels": ("kv_first", (2, 32, 256, 1024), 128, CodecSpec(key_outliers=8)),
    "K4V4, heads of 80": ("kv_first", (2, 32, 256, 2560), 80, CodecSpec()),
    "MLA latent of 576": ("latent", (61, 256, 576), 576, CodecSpec()),
}
WARM_UP, REPEATS = 3, 15


def timed(work: Callable[[], object]) -> float:
    """Median seconds of a call, the GPU's work included."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def measure(kind: str, shape: tuple[int, ...], head_dim: int, spec: CodecSpec) -> dict[str, float]:
    """GB/s of each way, and the relative squared error."""
    layout = ChunkLayout((GroupLayout(kind, shape, "bfloat16", head_dim),))
    plan, codec = make_plan(spec, layout), TurboQuantCodec(spec)
    x = torch.randn(shape, device="cuda").bfloat16()
    back, on_card = torch.empty_like(x), torch.empty_like(x)
    frame = torch.empty(plan.length, dtype=torch.uint8, pin_memory=True)
    plain = torch.empty(shape, dtype=torch.bfloat16, pin_memory=True)
    packed = torch.empty(plan.length, dtype=torch.uint8, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    flat, target = x.view(-1).view(torch.int16), back.view(-1).view(torch.int16)

    def encode_kernels() -> None:
        for s in plan.groups[0]:
            params = stream_params(s, "bfloat16", spec.seed)
            launch.encode_on_device(flat, s.coded, params, device.device_sections(s, packed), flag)

    def decode_kernels() -> None:
        for s in plan.groups[0]:
            params = stream_params(s, "bfloat16", spec.seed)
            launch.decode_on_device(target, s.coded, params, device.device_sections(s, packed))

    ways: dict[str, Callable[[], object]] = {
        "encode, kernels": encode_kernels,
        "decode, kernels": decode_kernels,
        "encode, to a frame": lambda: codec.encode_into([x], layout, frame),
        "decode, from a frame": lambda: codec.decode_into(frame, [back]),
        "copy on the card": lambda: on_card.copy_(x),
        "copy to the host": lambda: plain.copy_(x, non_blocking=True),
        "copy to the card": lambda: on_card.copy_(plain, non_blocking=True),
    }
    codec.encode_into([x], layout, frame)
    codec.decode_into(frame, [back])
    error = ((back.float() - x.float()) ** 2).sum() / (x.float() ** 2).sum()
    return {name: layout.nbytes / timed(way) / 1e9 for name, way in ways.items()} | {"error": float(error)}


def main() -> int:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything measured here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_triton: no CUDA device\n  what to do: run it on a machine with a GPU", file=sys.stderr)
        return 2
    console, results = Console(width=160), {}
    title = f"GB/s of bf16 KV, {torch.cuda.get_device_name()}, torch {torch.__version__}"
    table = Table(title=title, title_justify="left")
    for name, case in CASES.items():
        results[name] = measure(*case)
        if not table.columns:
            table.add_column("chunk")
            for head in results[name]:
                table.add_column(head, justify="right")
        table.add_row(
            name, *(f"{value:.4f}" if head == "error" else f"{value:.1f}" for head, value in results[name].items())
        )
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "GB/s": results}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
