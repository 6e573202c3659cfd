"""Compile the Triton kernels for an NVIDIA GPU that is not there, by the launches of the package.

usage: python tests/kernels/triton_compile.py     (writes one JSON object: what is in the PTX of every kernel)

The interpreter takes Python that the compiler refuses, and rounds as numpy does; this shows what a GPU would be given.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from tq_offload.kernels import Stream, VectorParams
from tq_offload.kernels.triton import launch
from tq_offload.kernels.triton.sections import SIGNED, DeviceSections

DEFAULTS = VectorParams("bfloat16", 4, 0, "lsq", mean=True, fit_range=True, qjl=False)
# Planes, tokens, vectors, dim, and how they are coded.
CASES: dict[str, tuple[tuple[int, int, int, int], VectorParams]] = {
    "default": ((2, 256, 8, 128), DEFAULTS),
    "three bits, outliers": ((2, 256, 8, 64), replace(DEFAULTS, bits=3, rule="norm", outliers=8)),
    "blocks, sketch": ((2, 100, 3, 80), replace(DEFAULTS, dtype="float16", rule="unbiased", qjl=True)),
    "latent": ((2, 256, 1, 576), DEFAULTS),
    "ones": ((1, 1, 1, 1), replace(DEFAULTS, dtype="float8_e4m3fn", bits=8)),
}
PATTERNS = {
    "contracted": r"\bfma\.", "flushed": r"\.ftz", "approximate": r"\.approx|div\.full", "divisions": r"div\.rn\.f32",
    "spills": r"st\.local",
}  # fmt: skip


class NoDriver:
    """What triton asks its driver for when it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def sections(stream: Stream, params: VectorParams) -> DeviceSections:
    P, T, J, D, k = stream.planes, stream.tokens, stream.vectors, stream.dim, params.outliers

    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    return DeviceSections(
        means=empty(torch.int16, P, J, D),
        scales=empty(torch.int16, P, T, J),
        codes=empty(torch.uint8, P, T, J, (D * params.bits + 7) // 8),
        sketch_scales=empty(torch.int16, P, T, J) if params.qjl else None,
        sketch=empty(torch.uint8, P, T, J, (D + 7) // 8) if params.qjl else None,
        outlier_channels=empty(torch.int16, P, J, k),
        outlier_ranges=empty(torch.float32, P, J, k, 2),
        outlier_codes=empty(torch.uint8, P, T, J, (k + 1) // 2),
    )


def main() -> None:
    found: dict[str, dict[str, int]] = {}
    case = ""

    def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **settings, **launch.EXACT)
        ptx = compiled.asm["ptx"]
        found[f"{case}: {kernel.__name__}"] = {name: len(re.findall(p, ptx)) for name, p in PATTERNS.items()}

    triton.runtime.driver.set_active(NoDriver())
    launch._launch = compile_only  # type: ignore[assignment]
    for case, ((P, T, J, D), params) in CASES.items():  # noqa: B007 (read above)
        stream = Stream(P, T, J, D, 0, T * J * D, J * D, D)
        flat = torch.zeros(P * T * J * D, dtype=SIGNED[getattr(torch, params.dtype).itemsize])
        out = sections(stream, params)
        launch.encode_on_device(flat, stream, params, out, torch.zeros(1, dtype=torch.int32))
        launch.decode_on_device(flat, stream, params, out)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
