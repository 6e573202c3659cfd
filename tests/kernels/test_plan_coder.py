"""What a plan settles once: coders of streams, the check of its numbers, and plans cut for several threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_tensor

from tq_offload.buffers import flat_bits
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import LayoutError
from tq_offload.frame import FramePlan, make_plan
from tq_offload.kernels import get_backend, stream_params
from tq_offload.kernels.base import StreamCoder
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

SPEC = CodecSpec(key_bits=4, value_bits=3, qjl=False, key_outliers=2, protect_first=1)
LAYOUT = ChunkLayout((GroupLayout("kv_first", (2, 5, 70, 192), "bfloat16", 64),))
BACKENDS = ("numba", "reference")


def chunk(seed: int = 0) -> torch.Tensor:
    return make_tensor(LAYOUT.groups[0].shape, torch.bfloat16, seed=seed)


def coder_of(backend: str, plan: FramePlan) -> StreamCoder:
    stream = plan.groups[0][0]
    return get_backend(backend).coder(stream, stream_params(stream, "bfloat16", plan.spec.seed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("qjl", [False, True])
def test_parts_of_a_stream_write_what_the_whole_writes(backend: str, qjl: bool) -> None:
    spec = CodecSpec(key_bits=4, value_bits=3, qjl=qjl, key_outliers=2, protect_first=1)
    x, plan = chunk(), make_plan(spec, LAYOUT)
    whole = np.frombuffer(TurboQuantCodec(spec, "reference").encode([x], LAYOUT), np.uint8)
    flat, frame = flat_bits(x, LAYOUT.groups[0]), whole.copy()
    for stream in plan.groups[0]:
        for section in stream.sections():
            if section != stream.raw_section:
                frame[section.offset : section.offset + section.nbytes] = 0xAA
        parts = stream.cut(3)
        assert [part.coded.planes for part in parts] == [1, 1, 2]
        for part in parts:
            get_backend(backend).coder(part, stream_params(stream, "bfloat16", spec.seed)).encode(flat, frame)
    assert np.array_equal(frame, whole)
    wanted, found = torch.zeros_like(x), torch.zeros_like(x)
    TurboQuantCodec(spec, "reference").decode_into(whole, [wanted])
    found[:, :1] = wanted[:, :1]  # protected
    for stream in plan.groups[0]:
        for part in stream.cut(9):
            coder = get_backend(backend).coder(part, stream_params(stream, "bfloat16", spec.seed))
            coder.decode(flat_bits(found, LAYOUT.groups[0]), whole)
    assert torch.equal(found, wanted)


def test_a_plan_is_cut_into_no_more_parts_than_planes_and_none_for_none() -> None:
    all_protected = make_plan(CodecSpec(protect_first=5), LAYOUT)
    assert make_plan(SPEC, LAYOUT).groups[0][0].cut(1)[0].coded.planes == 4
    assert len(make_plan(SPEC, LAYOUT).groups[0][0].cut(100)) == 4
    assert all_protected.groups[0][0].cut(2) == []


def test_a_coder_keeps_to_its_buffers() -> None:
    plan = make_plan(SPEC, LAYOUT)
    coder, flat = coder_of("numba", plan), flat_bits(chunk(), LAYOUT.groups[0])
    frame = np.zeros(plan.length, np.uint8)
    coder.encode(flat, frame)
    last = plan.groups[0][0].coded
    needed = last.offset + (last.planes - 1) * last.plane_stride + 69 * last.token_stride + 2 * last.vector_stride + 64
    wrong: list[tuple[Any, Any]] = [
        (flat[: needed - 1], frame),
        (flat.astype(np.uint8), frame),
        (flat.reshape(2, -1), frame),
        (np.repeat(flat, 2)[::2], frame),
        (flat, frame[: plan.groups[0][0].outlier_codes.offset]),  # type: ignore[union-attr]
        (flat, frame.view(np.uint16)),
        (flat, np.repeat(frame, 2)[::2]),
    ]
    for source, target in wrong:
        with pytest.raises(LayoutError):
            coder.encode(source, target)
        with pytest.raises(LayoutError):
            coder.decode(source, target)
    frozen_frame, frozen_chunk = frame.copy(), flat.copy()
    frozen_frame.flags.writeable = frozen_chunk.flags.writeable = False
    with pytest.raises(LayoutError, match="read-only"):
        coder.encode(flat, frozen_frame)
    with pytest.raises(LayoutError, match="read-only"):
        coder.decode(frozen_chunk, frame)
    coder.encode(frozen_chunk, frame)
    coder.decode(flat.copy()[:needed], frozen_frame)


def test_a_coder_refuses_outlier_channels_outside_the_vector() -> None:
    plan = make_plan(SPEC, LAYOUT)
    frame = np.frombuffer(TurboQuantCodec(SPEC).encode([chunk()], LAYOUT), np.uint8).copy()
    section = plan.groups[0][0].outlier_channels
    assert section is not None
    frame[section.offset : section.offset + 2] = 255
    with pytest.raises(LayoutError, match="ascend"):
        coder_of("numba", plan).decode(flat_bits(chunk(), LAYOUT.groups[0]), frame)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=300),
    places=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=4),
)
def test_numbers_that_are_not_finite_are_found(backend: str, numbers: list[int], places: list[tuple[int, int]]) -> None:
    bits = np.array(numbers, np.uint16)
    cut = [(min(at, len(bits)), min(count, len(bits) - min(at, len(bits)))) for at, count in places]
    finite = all((bits[at : at + count] & 0x7F80 != 0x7F80).all() for at, count in cut)
    check = get_backend(backend).finite_check(np.array([(2 * at, count) for at, count in cut], np.int64).reshape(-1, 2))
    assert check(bits.view(np.uint8)) == finite
    assert check(np.full(bits.nbytes, 0xFF, np.uint8)) == all(count == 0 for _, count in cut)


def test_a_check_keeps_to_the_frame() -> None:
    check = get_backend("numba").finite_check(np.array([(4, 10)], np.int64))
    assert check(np.zeros(24, np.uint8))
    for frame in (np.zeros(23, np.uint8), np.zeros(48, np.uint8)[::2], np.zeros(24, np.uint16)):
        with pytest.raises(LayoutError):
            check(frame)
    with pytest.raises(LayoutError):
        get_backend("numba").finite_check(np.array([(-4, 10)], np.int64))
