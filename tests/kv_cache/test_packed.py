"""`PackedTokens` holds what the codec writes for the same vectors, and can be cut, joined and selected."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from packed_support import kv
from support import layout_of

from tq_offload.buffers import section_view
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import LayoutError, NonFiniteError
from tq_offload.kernels import Sections, get_backend
from tq_offload.kv_cache.packed import PackedTokens, flat_span, vector_params
from tq_offload.spec import CodecSpec

SPECS = (
    CodecSpec(),
    CodecSpec(3, 4, seed=7, mean=False),
    CodecSpec(8, 4, key_rule="norm", value_rule="unbiased", fit_range=False),
    CodecSpec(3, 5, qjl=True, key_rule="unbiased"),
    CodecSpec(key_outliers=5),
)
CASES = [(spec, 64, "bfloat16") for spec in SPECS] + [(SPECS[0], 128, "bfloat16"), (SPECS[1], 80, "float16")]
NAMES = tuple(f.name for f in fields(Sections))


def pack(
    x: torch.Tensor, side: str = "K", chunk: int = 256, spec: CodecSpec = SPECS[0], backend: str = "numba"
) -> PackedTokens:
    tokens = min(chunk, x.shape[2])
    return PackedTokens.encode(get_backend(backend), x, vector_params(spec, side, x.dtype, tokens, x.shape[3]), chunk)


def unpack(packed: PackedTokens) -> torch.Tensor:
    rows, _, _, heads = packed.scales.shape
    out = torch.zeros(rows, heads, packed.length, packed.dim, dtype=getattr(torch, packed.params.dtype))
    decode = get_backend("numba").decoder(packed.dim, list(packed.chunks(0)))
    decode(flat_span(out), (out.stride(0), out.stride(1), out.stride(2)))
    return out


def assert_equal(a: PackedTokens, b: PackedTokens) -> None:
    assert (a.params, a.dim, a.length) == (b.params, b.dim, b.length)
    for name in NAMES:
        mine, other = getattr(a, name), getattr(b, name)
        assert (mine is None) == (other is None)
        assert mine is None or torch.equal(mine, other), name


@pytest.mark.parametrize(("spec", "dim", "dtype"), [*CASES, (SPECS[0], 64, "float32")])
def test_same_bytes_as_a_frame_of_the_codec(spec: CodecSpec, dim: int, dtype: str, backend: str) -> None:
    """A chunk [2, 1, T, H*D] of the codec, and the same vectors as K and V [B, H, T, D]: two rows, two chunks."""
    chunk, heads = 80, 2
    k, v = kv(2 * chunk, rows=2, heads=heads, dim=dim, dtype=getattr(torch, dtype))
    codec = TurboQuantCodec(spec, backend)
    packed = {side: pack(x, side, chunk, spec, backend) for side, x in (("K", k), ("V", v))}
    decoded = {side: unpack(p) for side, p in packed.items()}
    for row in range(2):
        for at in range(2):
            span = slice(at * chunk, (at + 1) * chunk)
            flat = [x[row, :, span].transpose(0, 1).reshape(chunk, heads * dim) for x in (k, v)]
            tensor = torch.stack(flat)[:, None].contiguous()
            layout = layout_of(tensor, head_dim=dim)
            frame = codec.encode([tensor], layout)
            plan = codec.open(frame).plan
            assert [stream.side for stream in plan.groups[0]] == ["K", "V"]
            raw = np.frombuffer(frame, np.uint8)
            for stream in plan.groups[0]:
                mine = packed[stream.side].sections(row, slice(at, at + 1))
                for name in NAMES:
                    section, found = getattr(stream, name), getattr(mine, name)
                    assert (section is None) == (found is None), name
                    if section is not None:
                        wanted = section_view(raw, section, found.dtype)
                        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted, name)
            (back,) = codec.decode(frame)
            for i, side in enumerate("KV"):
                again = back[i, 0].reshape(chunk, heads, dim).transpose(0, 1)
                assert torch.equal(decoded[side][row, :, span], again)


def test_shapes_and_bytes() -> None:
    packed = pack(kv(512, rows=3, heads=2, dim=36)[0], spec=CodecSpec(3, 3, qjl=True))
    assert packed.codes.shape == (3, 2, 256, 2, 14)
    assert packed.codes.dtype == torch.uint8
    assert packed.scales.shape == (3, 2, 256, 2)
    assert packed.means is not None
    assert packed.means.shape == (3, 2, 2, 36)
    assert packed.sketch is not None
    assert packed.sketch.shape == (3, 2, 256, 2, 5)
    assert packed.nbytes == 3 * 512 * 2 * (14 + 2 + 5 + 2) + 3 * 2 * 2 * 36 * 2
    assert pack(kv(63)[0]).means is None
    assert pack(kv(64)[0]).means is not None
    assert pack(kv(640)[0], "V", 64, CodecSpec(2, 5)).params.bits == 5


def test_strides_do_not_matter() -> None:
    x = kv(100, rows=2)[0]
    wanted = pack(x)
    tokens_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    inside = torch.full((3, 4, 120, 64), float("nan"))
    inside[1:, 1:3, 7:107] = x
    spread = torch.stack([x, torch.full_like(x, float("inf"))], dim=-1)[..., 0]
    for view in (tokens_first, inside[1:, 1:3, 7:107], spread):
        assert not view.is_contiguous()
        assert_equal(pack(view), wanted)
    one = x[:1]
    assert_equal(pack(one.expand(2, -1, -1, -1)), pack(torch.cat([one, one])))


@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 95, 96])
def test_crop_leaves_the_codes_and_lets_chunks_go(length: int) -> None:
    packed = pack(kv(96, rows=2)[0], chunk=32)
    cropped = packed.crop(length)
    chunks = -(-length // 32)
    assert cropped.length == length
    assert torch.equal(cropped.codes, packed.codes[:, :chunks])
    assert cropped.codes.untyped_storage().nbytes() == packed.codes.untyped_storage().nbytes() * chunks // 3
    assert cropped.nbytes == packed.nbytes * chunks // 3
    assert torch.equal(unpack(cropped), unpack(packed)[:, :, :length])
    assert packed.length == 96


def test_append_is_the_same_as_packing_at_once() -> None:
    x = kv(256, rows=2)[0]
    first, second = pack(x[:, :, :192], chunk=64), pack(x[:, :, 192:], chunk=64)
    assert first.can_take(second)
    assert_equal(first.append(second), pack(x, chunk=64))


def test_what_cannot_be_appended() -> None:
    x = kv(128)[0]
    packed = pack(x, chunk=64)
    others = [
        pack(x[:, :, :32], chunk=64),
        pack(x, chunk=32),
        pack(x, "V", 64, CodecSpec(4, 5)),
        pack(x.bfloat16(), chunk=64),
        pack(x, chunk=64, spec=CodecSpec(seed=1)),
    ]
    assert not any(packed.can_take(other) for other in others)
    assert not packed.crop(100).can_take(packed)
    assert packed.crop(64).can_take(packed)


def test_rows_can_be_selected() -> None:
    x = kv(100, rows=3)[0]
    index = torch.tensor([2, 0, 0])
    chosen = pack(x).map(lambda part: part.index_select(0, index))
    assert_equal(chosen, pack(x[index]))


def test_chunks_cover_every_token_once() -> None:
    packed = pack(kv(96, rows=2)[0], chunk=32).crop(75)
    for row in range(2):
        spans = [(c.start, c.start + c.planes * c.tokens) for c in packed.chunks(10) if c.row == row]
        assert spans[0][0] == 10
        assert spans[-1][1] == 85
        assert all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [(0, 0, 0, 0), (1, 1, 99, 63), (1, 0, 50, 31)])
def test_nan_and_inf_are_refused(value: float, where: tuple[int, ...], backend: str) -> None:
    x = kv(100, rows=2)[0]
    x[where] = value
    with pytest.raises(NonFiniteError):
        pack(x, backend=backend)


def test_what_cannot_be_packed_says_what_can() -> None:
    for x in (torch.zeros(1, 1, 4, 8, dtype=torch.float64), torch.zeros(1, 1, 4, 8).int()):
        with pytest.raises(LayoutError, match="load the model in bfloat16, float16 or float32"):
            pack(x)
    with pytest.raises(LayoutError, match="1025 elements cannot be packed: head_dim is at most 1024"):
        pack(torch.zeros(1, 1, 4, 1025))
