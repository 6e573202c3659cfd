"""Launches of the Triton kernels over streams of tensors on a device; queued on the current CUDA stream."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tq_offload import codebook, rotation
from tq_offload.errors import LayoutError
from tq_offload.kernels.base import Stream, VectorParams
from tq_offload.kernels.triton.sections import FIELDS, SIGNED, DeviceSections, check_stream, interpreted
from tq_offload.spec import OUTLIER_BITS

__all__ = ["EXACT", "decode_on_device", "encode_on_device"]

_TILE = 2048  # elements that a program works on: 16 for each of the threads of 4 warps
_INTERPRETED_TILE = 1 << 17  # the interpreter pays for operations, not for elements
_BLOCK, _INTERPRETED_BLOCK = 128, 4096  # channels that a program sums
_UNROLL = 8

EXACT = {"enable_fp_fusion": False}  # a multiply and an add are two roundings


def encode_on_device(
    flat: torch.Tensor, stream: Stream, params: VectorParams, out: DeviceSections, not_finite: torch.Tensor
) -> None:
    """Encode a stream: one launch for its vectors, after one for its means and, if it has any, those for its outliers.

    Args:
        flat: 1-D bits of all elements of the group, signed integers of the elements' size.
        stream: Which of them.
        params: How.
        out: Sections, on the same device.
        not_finite: i32 [1]; becomes 1 if an element is NaN or Inf, and `out` is then undefined.

    Raises:
        LayoutError: The stream leaves `flat`, or sections do not fit it.
    """
    count = stream.planes * stream.tokens * stream.vectors
    if not count:
        return
    from tq_offload.kernels.triton import stream_kernels as kernels

    check_stream(flat, stream, params, out)
    src, D, bits = flat[stream.offset :], stream.dim, params.bits
    if params.mean:
        grid, settings = _channels(stream, params)
        _launch(
            kernels.mean_kernel, grid, src, out.means, stream.tokens, stream.vectors * D, *_strides(stream),
            _f32(1.0 / stream.tokens), **settings,
        )  # fmt: skip
    if params.outliers:
        _code_outliers(src, stream, params, out)
    alpha, beta = codebook.RANGE_FIT[bits] if params.fit_range else (1.0, 0.0)
    words, sketch_words = D % 8 == 0 and bits in SIGNED, D % 8 == 0
    codes = out.codes.view(-1).view(SIGNED[bits] if words else torch.uint8)
    sketch = None if out.sketch is None else out.sketch.view(-1).view(torch.int8 if sketch_words else torch.uint8)
    grid, shape = _vectors(D, count)
    _launch(
        kernels.encode_kernel, grid, src, _or(out.means, out.scales), out.scales, codes,
        _or(out.sketch_scales, out.scales), _or(sketch, codes), not_finite, *_outliers(stream, params, out),
        *_tables(params.seed, bits, D, flat.device), count, stream.tokens, stream.vectors, *_strides(stream),
        BITS=bits, RULE=kernels.RULES.index(params.rule), MEAN=params.mean, QJL=params.qjl, K=params.outliers,
        WORDS=words, SKETCH_WORDS=sketch_words, ALPHA=_f32(alpha), BETA=_f32(beta), INVERSE_D=_f32(1.0 / D),
        **_format(params), **shape,
    )  # fmt: skip


def decode_on_device(flat: torch.Tensor, stream: Stream, params: VectorParams, sections: DeviceSections) -> None:
    """Decode a stream in place into `flat`, bits as for `encode_on_device`, in one launch; errors are the same.

    Outlier channels must be inside a vector: see `Sections.outliers_fit`.
    """
    count = stream.planes * stream.tokens * stream.vectors
    if not count:
        return
    from tq_offload.kernels.triton import stream_kernels as kernels

    check_stream(flat, stream, params, sections)
    grid, shape = _vectors(stream.dim, count)
    signs, levels, _ = _tables(params.seed, params.bits, stream.dim, flat.device)
    scales, codes = sections.scales, sections.codes
    _launch(
        kernels.decode_kernel, grid, flat[stream.offset :], _or(sections.means, scales), scales, codes,
        _or(sections.sketch_scales, scales), _or(sections.sketch, codes), *_outliers(stream, params, sections), signs,
        levels, count, stream.tokens, stream.vectors, *_strides(stream),
        BITS=params.bits, MEAN=params.mean, QJL=params.qjl, K=params.outliers,
        INVERSE_SQRT_D=_f32(1.0 / math.sqrt(stream.dim)), **_format(params), **shape,
    )  # fmt: skip


def _code_outliers(src: torch.Tensor, stream: Stream, params: VectorParams, out: DeviceSections) -> None:
    """Choose and code the outlier channels, and make their means 0."""
    from tq_offload.kernels.triton import outlier_kernels as kernels

    P, J, D, k = stream.planes, stream.vectors, stream.dim, params.outliers
    grid, settings = _channels(stream, params)
    sums = torch.empty((3, P, J, D), dtype=torch.float32, device=src.device)
    _launch(kernels.statistics_kernel, grid, src, sums, stream.tokens, J * D, *_strides(stream), **settings)
    energy, low, high = sums.unbind()
    channels = torch.sort(energy, dim=-1, descending=True, stable=True).indices[..., :k].sort(dim=-1).values
    low, high = low.gather(-1, channels) + 0.0, high.gather(-1, channels) + 0.0  # never -0
    # By a tensor: torch multiplies by the reciprocal of a number on a GPU.
    step = (high - low) / torch.full_like(low, 2.0**OUTLIER_BITS - 1)
    _present(out.outlier_channels).copy_(channels)
    _present(out.outlier_ranges).copy_(torch.stack([low, step], dim=-1))
    if out.means is not None:
        out.means.scatter_(-1, channels, 0)
    pairs = _power_from((k + 1) // 2)
    count = P * stream.tokens * J
    N = _tile(pairs, count)
    _launch(
        kernels.outlier_code_kernel, (-(-count // N),), src, out.outlier_channels, out.outlier_ranges,
        out.outlier_codes, count, stream.tokens, J, *_strides(stream), K=k, PAIRS=pairs, N=N, **_format(params),
    )  # fmt: skip


def _outliers(
    stream: Stream, params: VectorParams, sections: DeviceSections
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments of a kernel: the slot of every channel or -1, i8 [P, J, D], the ranges, and the coarse codes."""
    if not params.outliers:
        return sections.codes, sections.codes, sections.codes
    channels = _present(sections.outlier_channels).long()
    P, J, k = channels.shape
    slots = torch.full((P, J, stream.dim), -1, dtype=torch.int8, device=channels.device)
    slots.scatter_(-1, channels, torch.arange(k, dtype=torch.int8, device=channels.device).expand(P, J, k))
    return slots, _present(sections.outlier_ranges), _present(sections.outlier_codes)


def _present(section: torch.Tensor | None) -> torch.Tensor:
    if section is None:
        raise LayoutError("a section is missing")
    return section


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Launch with the arithmetic of the format."""
    with np.errstate(over="ignore", invalid="ignore"):  # under the interpreter; what overflows is looked at afterwards
        kernel[grid](*args, **settings, **EXACT)


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that the kernel does not look at."""
    return other if tensor is None else tensor


def _f32(x: float) -> float:
    return float(np.float32(x))


def _power_from(n: int) -> int:
    """Least power of two that is not below n."""
    return 1 << (n - 1).bit_length()


def _tile(width: int, count: int) -> int:
    """Rows of that width that a program works on, a power of two."""
    return max(1, min((_INTERPRETED_TILE if interpreted() else _TILE) // width, _power_from(count)))


def _strides(stream: Stream) -> tuple[int, int, int]:
    return stream.plane_stride, stream.token_stride, stream.vector_stride


def _format(params: VectorParams) -> dict[str, int]:
    return dict(zip(("EXPONENT", "MANTISSA", "LIMIT"), FIELDS[params.dtype], strict=True))


def _padded(dim: int) -> int:
    return max(8, _power_from(dim))


def _vectors(dim: int, count: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and settings of a kernel whose programs take N vectors each."""
    N, block = _tile(_padded(dim), count), rotation.block_size(dim)
    return (-(-count // N),), {"D": dim, "B": block, "P": _padded(dim), "N": N, "NORM": _f32(1.0 / math.sqrt(block))}


def _channels(stream: Stream, params: VectorParams) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and settings of a kernel whose programs take BLOCK channels each."""
    channels = stream.vectors * stream.dim
    block = min(_INTERPRETED_BLOCK, _power_from(channels)) if interpreted() else _BLOCK
    return (stream.planes, -(-channels // block)), {
        "D": stream.dim, "BLOCK": block, "UNROLL": _UNROLL, **_format(params),
    }  # fmt: skip


@lru_cache(maxsize=64)
def _tables(seed: int, bits: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """On the device: signs f32 [8, P], 0 past D; levels f32 [2**bits]; thresholds f32 [2**bits - 1]."""
    signs = np.zeros((2 * rotation.SKETCH_STAGE, _padded(dim)), np.float32)
    for stage, row in enumerate(signs):
        row[:dim] = rotation.signs(seed, stage, dim)
    tables = (signs, codebook.levels(bits).copy(), codebook.thresholds(bits).copy())
    first, second, third = (torch.from_numpy(table).to(device) for table in tables)
    return first, second, third
