"""Properties of the codec over random layouts, specs and data."""

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tq_offload.bitpack import pack, packed_size, unpack
from tq_offload.codec import TurboQuantCodec
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.rotation import inverse_rotate, is_power_of_two, rotate
from tq_offload.spec import SCALE_RULES, CodecSpec

SPECS = st.builds(
    CodecSpec,
    key_bits=st.integers(1, 8),
    value_bits=st.integers(1, 8),
    seed=st.integers(0, 2**32 - 1),
    mean=st.booleans(),
    key_rule=st.sampled_from(SCALE_RULES),
    value_rule=st.sampled_from(SCALE_RULES),
    fit_range=st.booleans(),
    qjl=st.booleans(),
    key_outliers=st.integers(0, 9),
    protect_first=st.integers(0, 2),
    protect_last=st.integers(0, 2),
)
RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def groups(draw: st.DrawFn) -> GroupLayout:
    kind = draw(st.sampled_from(["kv_first", "packed", "latent", "kv_token", "token_kv"]))
    dim, heads = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    layers, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 70))
    shape = {
        "kv_first": (2, layers, tokens, heads * dim),
        "packed": (1, layers, tokens, heads * 2 * dim),
        "latent": (layers, tokens, heads * dim),
        "kv_token": (2, tokens, heads * dim),
        "token_kv": (tokens, 2, heads * dim),
    }[kind]
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]))
    return GroupLayout(kind, shape, dtype, dim)


def tensor_for(group: GroupLayout, seed: int) -> torch.Tensor:
    x = np.random.Generator(np.random.PCG64(seed)).standard_normal(group.shape).astype(np.float32)
    return torch.from_numpy(x).to(getattr(torch, group.dtype))


@RELAXED
@given(spec=SPECS, group=groups(), seed=st.integers(0, 1000))
def test_any_chunk_round_trips_in_the_promised_size(spec: CodecSpec, group: GroupLayout, seed: int) -> None:
    x = tensor_for(group, seed)
    layout = ChunkLayout((group,))
    codec = TurboQuantCodec(spec)
    frame = codec.encode([x], layout)
    assert len(frame) == codec.frame_size(layout)
    assert codec.encode([x], layout) == frame
    header = codec.inspect(frame)
    assert (header.spec, header.layout) == (spec, layout)
    (y,) = codec.decode(frame)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert torch.isfinite(y.float()).all()
    if x.numel():
        # No reconstruction is further off than a small multiple of the vector's own length.
        assert float((y.float() - x.float()).norm()) <= 3 * float(x.float().norm()) + 1e-6


FINITE = hnp.arrays(np.float32, (2, 1, 3, 32), elements=st.floats(-(2.0**126), 2.0**126, width=32))


@RELAXED
@given(data=FINITE)
def test_any_finite_input_stays_finite_and_close(data: np.ndarray) -> None:
    x = torch.from_numpy(data).to(torch.bfloat16)
    layout = ChunkLayout((GroupLayout.infer(x.shape, x.dtype, head_dim=32),))
    codec = TurboQuantCodec()
    (y,) = codec.decode(codec.encode([x], layout))
    assert torch.isfinite(y).all()
    a, b = x.double(), y.double()
    scale = a.abs().amax(dim=-1, keepdim=True).clamp_min(1e-37)
    error = ((a / scale - b / scale) ** 2).sum(-1)
    assert (error <= 0.3 * ((a / scale) ** 2).sum(-1) + 1e-4).all()


@given(st.integers(1, 8).flatmap(lambda b: st.tuples(st.just(b), st.lists(st.integers(0, 2**b - 1), max_size=200))))
def test_packing_round_trips(case: tuple[int, list[int]]) -> None:
    bits, codes = case
    array = np.array(codes, np.uint8)
    packed = pack(array, bits)
    assert len(packed) == packed_size(len(codes), bits)
    assert unpack(packed, len(codes), bits).tolist() == codes


@RELAXED
@given(dim=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_rotation_keeps_angles(dim: int, seed: int) -> None:
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).standard_normal((4, dim)).astype(np.float32))
    y = rotate(x, seed)
    gain = dim if is_power_of_two(dim) else 1
    torch.testing.assert_close(y @ y.T, (x @ x.T) * gain, rtol=2e-4, atol=2e-3 * gain)
    torch.testing.assert_close(inverse_rotate(y, seed) / gain, x, rtol=1e-4, atol=1e-4)
