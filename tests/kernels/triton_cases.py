"""The Triton backend writes the reference's bytes, over the table of the CPU kernels; whole chunks to frames and back.

Run by `test_triton.py` in a process of its own, under TRITON_INTERPRET=1 (read when triton is imported) and on a GPU:
`python -m pytest tests/kernels/triton_cases.py`.
"""

# No `from __future__ import annotations`: triton reads those of `sum_rows`.
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from golden_cases import CASES, Case, make_case
from kernels.test_cpu_numba import (
    BITS,
    DEFAULTS,
    DTYPES,
    REFERENCE,
    RULES,
    Chunk,
    assert_same,
    assert_sketch_scales_of_any_size,
    chunk,
    chunk_of,
    layouts,
    refuses_channels,
    sections,
    special_values,
)
from support import layout_of, make_tensor, one_torch_thread

from tq_offload import codec as codec_module
from tq_offload import quantizer
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import (
    ChecksumError,
    FrameContentError,
    FrameMismatchError,
    LayoutError,
    NonFiniteError,
    TQOffloadError,
)
from tq_offload.frame import make_plan, write_checksum
from tq_offload.kernels import Stream
from tq_offload.kernels.triton import TritonBackend
from tq_offload.kernels.triton.launch import EXACT
from tq_offload.kernels.triton.sections import default_device
from tq_offload.kernels.triton.steps import hsum
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

__all__ = ["one_torch_thread"]

DIMS = (1, 16, 32, 36, 64, 80, 96, 112, 127, 128, 192, 256, 576)
TRITON = TritonBackend()
DEVICE = default_device()


@pytest.mark.parametrize("dim", DIMS)
def test_bits(dim: int) -> None:
    for bits in BITS if dim in (64, 80) else (1 + dim % 3, 4 + dim % 5):
        params = replace(DEFAULTS, bits=bits, mean=False, rule=RULES[bits % 3], seed=bits)
        assert_same(chunk(1, 9 + bits, 2, dim, seed=bits + dim), params, TRITON)


@triton.jit
def sum_rows(x: tl.tensor, out: tl.tensor, N: tl.constexpr, P: tl.constexpr) -> None:
    """Sums of f32 [N, P] by `hsum`."""
    n = tl.arange(0, N)
    tl.store(out + n, hsum(tl.load(x + n[:, None] * P + tl.arange(0, P)[None, :]), N, P))


@pytest.mark.parametrize("size", [8, 128, 1024])
def test_the_order_of_sums(size: int) -> None:
    """To the last bit; scales of few bits would hide it."""
    x = torch.randn(64, size, generator=torch.Generator().manual_seed(size))
    out = torch.zeros(64, device=DEVICE)
    sum_rows[(1,)](x.to(DEVICE), out, N=64, P=size, **EXACT)
    assert torch.equal(out.cpu(), quantizer.hsum(x))


@pytest.mark.parametrize("dim", DIMS)
def test_means(dim: int) -> None:
    assert_same(chunk(2, 70, 2, dim, seed=dim), replace(DEFAULTS, bits=3 + dim % 2), TRITON)


@pytest.mark.parametrize("tokens", [0, 1, 15, 64, 257])
def test_tokens(tokens: int) -> None:
    """257: means are summed in unequal rounds, and vectors are left over in the last program."""
    assert_same(chunk(1, tokens, 3, 64), replace(DEFAULTS, mean=tokens >= 64), TRITON)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 2.0, 150.0])
def test_dtypes(dtype: str, scale: float) -> None:
    for dim, bits in ((64, 4), (36, 3)):
        assert_same(chunk(2, 66, 2, dim, dtype, scale=scale), replace(DEFAULTS, dtype=dtype, bits=bits), TRITON)


@pytest.mark.parametrize(("rule", "fit_range", "mean"), list(product(RULES, (False, True), (False, True))))
def test_rules(rule: str, fit_range: bool, mean: bool) -> None:
    assert_same(chunk(1, 65, 2, 64), replace(DEFAULTS, rule=rule, fit_range=fit_range, mean=mean), TRITON)


@pytest.mark.parametrize("dim", [16, 36, 64, 127])
def test_qjl(dim: int) -> None:
    for bits, rule in ((2, "lsq"), (3, "unbiased")):
        assert_same(chunk(1, 20, 2, dim), replace(DEFAULTS, bits=bits, rule=rule, qjl=True, mean=bits == 3), TRITON)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outlier_channels(dtype: str) -> None:
    for dim, tokens, count, mean in ((64, 1, 1, False), (36, 15, 4, False), (128, 70, 3, True)):
        params = replace(DEFAULTS, dtype=dtype, outliers=count, mean=mean, qjl=dim == 36)
        assert_same(chunk(2, tokens, 3, dim, dtype, seed=dim, scale=0.5), params, TRITON)


@pytest.mark.parametrize("kind", layouts(1, 1, 1, 1))
def test_layouts(kind: str) -> None:
    """What lies between the vectors of a stream is not written."""
    L, T, H, dim = 3, 65, 2, 64
    flat = chunk(1, 1, 1, 2 * L * T * (H * dim + 60)).flat
    for offset, plane, token, vector in layouts(L, T, H, dim)[kind]:
        assert_same(Chunk(flat, Stream(L, T, H, dim, offset, plane, token, vector)), DEFAULTS, TRITON)


@pytest.mark.parametrize("name", special_values())
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_special_values(name: str, dtype: str) -> None:
    x = special_values()[name].to(getattr(torch, dtype))
    params = replace(DEFAULTS, dtype=dtype)
    assert_same(chunk_of(x), replace(params, outliers=4, qjl=True), TRITON)
    assert_same(chunk_of(x[..., :36].contiguous()), replace(params, mean=dtype == "float32", bits=1), TRITON)


def test_decoding_scales_that_reach_the_clamp() -> None:
    """Magnitudes up to the largest that a frame may hold, with and without the mean, and any mean."""
    stream = Stream(1, 4000, 1, 64, 0, 4000 * 64, 64, 64)
    s, random = sections(stream, DEFAULTS), np.random.Generator(np.random.PCG64(4))
    s.scales[...] = random.integers(0, 0x7F80, s.scales.shape) | random.integers(0, 2, s.scales.shape) << 15
    s.codes[...] = random.integers(0, 256, s.codes.shape)
    s.means[...] = random.integers(0, 0x7F80, s.means.shape)
    for dtype in DTYPES:
        kind = {1: np.uint8, 2: np.uint16, 4: np.float32}[getattr(torch, dtype).itemsize]
        first, second = (np.zeros(stream.plane_stride, kind) for _ in range(2))
        REFERENCE.decode(first, stream, replace(DEFAULTS, dtype=dtype), s)
        TRITON.decode(second, stream, replace(DEFAULTS, dtype=dtype), s)
        np.testing.assert_array_equal(second, first)


@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (36, "float32"), (16, "float8_e5m2")])
def test_sketch_scales_of_any_size(dim: int, dtype: str) -> None:
    assert_sketch_scales_of_any_size(TRITON, dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outliers", [0, 2])
def test_nan_and_inf_are_refused(dtype: str, outliers: int) -> None:
    for n, (token, vector, element) in enumerate(((0, 0, 0), (19, 1, -1), (7, 0, 17))):
        x = torch.ones(1, 20, 2, 64)
        x[0, token, vector, element] = float("nan") if n == 1 or dtype == "float8_e4m3fn" else float("-inf")
        c = chunk_of(x.to(getattr(torch, dtype)))
        params = replace(DEFAULTS, dtype=dtype, mean=n == 1, outliers=outliers)
        with pytest.raises(NonFiniteError):
            TRITON.encode(c.flat, c.stream, params, sections(c.stream, params))


@pytest.mark.parametrize(
    "wrong",
    [{"offset": 1}, {"offset": -1}, {"planes": 3}, {"token_stride": 129}, {"vector_stride": -64}, {"dim": 65}],
)
def test_a_stream_that_leaves_its_buffer_is_refused(wrong: dict[str, int]) -> None:
    c = chunk(2, 70, 2, 64)
    stream = replace(c.stream, **wrong)
    for call in (TRITON.encode, TRITON.decode):
        with pytest.raises(LayoutError):
            call(c.flat, stream, DEFAULTS, sections(stream, DEFAULTS))


@pytest.mark.parametrize("name", ["means", "scales", "codes", "outlier_channels", "outlier_ranges", "outlier_codes"])
def test_sections_that_do_not_fit_are_refused(name: str) -> None:
    c, params = chunk(2, 70, 2, 64), replace(DEFAULTS, outliers=2)
    good = sections(c.stream, params)
    good.outlier_channels[...], good.outlier_ranges[...] = (3, 9), 1
    array = getattr(good, name)
    for bad in (array[1:], array.astype(np.int32), None):
        for call in (TRITON.encode, TRITON.decode):
            with pytest.raises(LayoutError):
                call(c.flat, c.stream, params, replace(good, **{name: bad}))


@pytest.mark.parametrize("channels", [[64, 65], [3, 3], [9, 2]])
def test_channels_that_no_encoder_writes_are_refused(channels: list[int]) -> None:
    refuses_channels(TRITON, channels)


def test_a_read_only_destination_is_refused() -> None:
    c = chunk(1, 2, 1, 64)
    c.flat.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        TRITON.decode(c.flat, c.stream, DEFAULTS, sections(c.stream, DEFAULTS))


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in tensors]


def encode_frame(tensors: list[torch.Tensor], layout: ChunkLayout, spec: CodecSpec, out: Any, **bound: bytes) -> int:
    """The codec on tensors of the device, which under the interpreter is the CPU."""
    with patch.object(codec_module, "_on_gpu", return_value=True):
        return TurboQuantCodec(spec).encode_into(tensors, layout, out, **bound)


def decode_frame(frame: Any, tensors: list[torch.Tensor], **bound: bytes) -> Any:
    with patch.object(codec_module, "_on_gpu", return_value=True):
        return TurboQuantCodec().decode_into(frame, tensors, **bound)


def frame_of(case: Case) -> torch.Tensor:
    """The frame of the case by the device, in a longer buffer full of sevens."""
    length = make_plan(case.spec, case.layout).length
    out = torch.full((length + 9,), 7, dtype=torch.uint8)
    assert encode_frame(on_device(case.tensors), case.layout, case.spec, out, key=case.key, model=case.model) == length
    assert out[length:].tolist() == [7] * 9
    return out[:length]


@pytest.mark.parametrize("name", CASES)
def test_chunks_on_the_device_to_frames_and_back(name: str) -> None:
    case = make_case(name)
    codec = TurboQuantCodec(case.spec, "reference")
    frame = frame_of(case)
    assert frame.numpy().tobytes() == codec.encode(case.tensors, case.layout, key=case.key, model=case.model)
    back = [torch.zeros_like(t, device=DEVICE) for t in case.tensors]
    header = decode_frame(frame, back, key=case.key, model=case.model)
    assert header.layout == case.layout
    for found, wanted in zip(back, codec.decode(frame), strict=True):
        assert Case.digest_of(found.cpu()) == Case.digest_of(wanted)


@pytest.mark.parametrize("shape", [(2, 2, 70, 128), (2, 66, 256)])
def test_frames_with_outlier_channels(shape: tuple[int, ...]) -> None:
    x = make_tensor(shape)
    layout, spec = layout_of(x, head_dim=64, latent=False), CodecSpec(key_outliers=6)
    case = Case(spec, [x], layout, bytes(16), bytes(16))
    frame, codec = frame_of(case), TurboQuantCodec(spec, "reference")
    assert frame.numpy().tobytes() == codec.encode([x], layout)
    (back,) = [torch.zeros_like(x, device=DEVICE)]
    shifted = torch.empty(len(frame) + 1, dtype=torch.uint8)[1:].copy_(frame)  # sections at odd addresses
    decode_frame(shifted, [back])
    assert torch.equal(back.cpu().view(torch.int16), codec.decode(frame)[0].view(torch.int16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "float64"])
def test_opaque_groups_keep_their_bytes(dtype: str) -> None:
    x = (make_tensor((5, 33), torch.float32) * 1e3).to(getattr(torch, dtype))
    nothing = torch.zeros(0, 3, dtype=torch.uint8)
    layout = ChunkLayout((GroupLayout("opaque", (5, 33), dtype), GroupLayout("opaque", (0, 3), "uint8")))
    case = Case(CodecSpec(), [x, nothing], layout, bytes(16), bytes(16))
    frame = frame_of(case)
    assert frame.numpy().tobytes() == TurboQuantCodec(case.spec, "reference").encode(case.tensors, layout)
    back = torch.zeros_like(x, device=DEVICE)
    decode_frame(frame, [back, nothing.to(DEVICE)])
    assert Case.digest_of(back.cpu()) == Case.digest_of(x)


def test_the_codec_with_the_triton_backend() -> None:
    case = make_case("default_packed_128")
    frame = TurboQuantCodec(case.spec, TRITON).encode(case.tensors, case.layout)
    assert frame == TurboQuantCodec(case.spec, "reference").encode(case.tensors, case.layout)


@pytest.mark.parametrize("protect", [0, 2])
def test_a_chunk_that_is_not_finite_leaves_no_frame(protect: int) -> None:
    case = make_case("default_kv_first_64")
    case.tensors[0][1, 1, 3, 5] = float("inf")
    spec = replace(case.spec, protect_first=protect)
    out = torch.full((make_plan(spec, case.layout).length,), 7, dtype=torch.uint8)
    with pytest.raises(NonFiniteError):
        encode_frame(on_device(case.tensors), case.layout, spec, out)
    assert out[:8].tolist() == [0] * 8


def damaged(frame: torch.Tensor, offset: int, *values: int) -> torch.Tensor:
    """A frame with other bytes and a right checksum."""
    frame = frame.clone()
    frame[offset : offset + len(values)] = torch.tensor(values, dtype=torch.uint8)
    write_checksum(frame.numpy().data)
    return frame


def test_frames_that_are_refused_leave_the_destination_alone() -> None:
    case = make_case("default_kv_first_64")
    case = replace(case, spec=replace(case.spec, key_outliers=2))
    frame = frame_of(case)
    stream: Any = make_plan(case.spec, case.layout).groups[0][0]
    broken = frame.clone()
    broken[-1] ^= 1
    good = torch.full_like(case.tensors[0], 3, device=DEVICE)
    calls: list[tuple[type[TQOffloadError], Callable[[], Any]]] = [
        (ChecksumError, lambda: decode_frame(broken, [good])),
        (FrameMismatchError, lambda: decode_frame(frame, [good], key=bytes(16))),
        (FrameMismatchError, lambda: decode_frame(frame, [good], model=bytes(16))),
        (FrameMismatchError, lambda: decode_frame(frame, [good[:, :1]])),
        (FrameMismatchError, lambda: decode_frame(frame, [good.to(torch.float16)])),
        (FrameContentError, lambda: decode_frame(damaged(frame, stream.scales.offset, 0x80, 0x7F), [good])),
        (FrameContentError, lambda: decode_frame(damaged(frame, stream.means.offset, 0x80, 0xFF), [good])),
        (FrameContentError, lambda: decode_frame(damaged(frame, stream.outlier_channels.offset, 64), [good])),
        (FrameContentError, lambda: decode_frame(damaged(frame, stream.outlier_ranges.offset + 2, 192, 127), [good])),
        (LayoutError, lambda: decode_frame(frame, [good.transpose(2, 3).contiguous().transpose(2, 3)])),
        (LayoutError, lambda: decode_frame(frame.int(), [good])),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()
    assert bool((good == 3).all())


def test_tensors_that_do_not_fit_are_refused() -> None:
    case = make_case("default_kv_first_64")
    (x,) = on_device(case.tensors)
    out = torch.zeros(make_plan(case.spec, case.layout).length, dtype=torch.uint8)
    for tensors, target, changes in (
        ([x[:, :1]], out, {}),
        ([x.float()], out, {}),
        ([x, x], out, {}),
        ([x], out[1:], {}),
        ([x], out, {"key": b"short"}),
    ):
        with pytest.raises(LayoutError):
            encode_frame(tensors, case.layout, case.spec, target, **changes)
