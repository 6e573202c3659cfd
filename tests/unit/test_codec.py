"""The codec through its public door, on every backend."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from support import layout_of, make_tensor, relative_mse

from tq_offload.codebook import RELATIVE_MSE
from tq_offload.codec import TurboQuantCodec, cache_key_digest, model_fingerprint
from tq_offload.errors import ConfigError, FrameMismatchError, LayoutError, NonFiniteError
from tq_offload.kernels import BACKEND_ENV, get_backend
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import CodecSpec

LAYOUTS = [
    ((2, 3, 70, 2 * 64), {"head_dim": 64}),
    ((3, 70, 4 * 80), {"head_dim": 80, "latent": False}),
    ((1, 3, 70, 4 * 128), {"head_dim": 128, "latent": False}),
    ((1, 3, 70, 576), {"latent": True}),
    ((3, 70, 384), {}),
    ((2, 70, 2 * 127), {"head_dim": 127, "kind": "kv_token"}),
    ((70, 2, 2 * 96), {"head_dim": 96, "kind": "token_kv"}),
]
SPECS = [
    CodecSpec(),
    CodecSpec(mean=False, fit_range=False, key_rule="norm", value_rule="unbiased"),
    CodecSpec(3, 5, seed=11, qjl=True, protect_first=1, protect_last=1),
    CodecSpec(key_outliers=8, protect_last=1),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.describe())
@pytest.mark.parametrize(("shape", "known"), LAYOUTS)
def test_round_trip(backend: str, spec: CodecSpec, shape: tuple[int, ...], known: dict) -> None:
    x = make_tensor(shape)
    layout = layout_of(x, **known)
    codec = TurboQuantCodec(spec, backend)
    frame = codec.encode([x], layout)
    assert len(frame) == codec.frame_size(layout)
    (y,) = TurboQuantCodec(backend=backend).decode(frame)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert relative_mse(y, x) < 1.02 * RELATIVE_MSE[min(spec.key_bits, spec.value_bits)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes(backend: str, dtype: str) -> None:
    x = make_tensor((2, 2, 65, 128), getattr(torch, dtype))
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    assert y.dtype == x.dtype
    assert relative_mse(y, x) < 0.012


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float64, torch.int32, torch.bool])
def test_what_is_not_kv_passes_bit_exact(dtype: torch.dtype) -> None:
    x = (torch.arange(2 * 3 * 5 * 64).reshape(2, 3, 5, 64) % 251).to(dtype)
    codec = TurboQuantCodec()
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    torch.testing.assert_close(y, x, rtol=0, atol=0)
    assert y.dtype == dtype


def test_several_groups_in_one_object(backend: str) -> None:
    tensors = [
        make_tensor((3, 70, 512)),
        torch.arange(999, dtype=torch.int32).to(torch.uint8).reshape(3, 333),
        make_tensor((2, 2, 70, 192), torch.float16, seed=5),
    ]
    layout = ChunkLayout(
        (
            GroupLayout.infer((3, 70, 512), torch.bfloat16, head_dim=128, latent=False),
            GroupLayout.infer((3, 333), torch.uint8),
            GroupLayout.infer((2, 2, 70, 192), torch.float16, head_dim=96),
        )
    )
    codec = TurboQuantCodec(backend=backend)
    out = codec.decode(codec.encode(tensors, layout))
    assert relative_mse(out[0], tensors[0]) < 0.009
    torch.testing.assert_close(out[1], tensors[1], rtol=0, atol=0)
    assert relative_mse(out[2], tensors[2]) < 0.009


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64])
def test_few_tokens(backend: str, tokens: int) -> None:
    x = make_tensor((2, 3, tokens, 128))
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    assert y.shape == x.shape
    if tokens:
        assert relative_mse(y, x) < 0.009


def test_protected_layers_are_exact(backend: str) -> None:
    x = make_tensor((2, 6, 64, 128))
    codec = TurboQuantCodec(CodecSpec(protect_first=2, protect_last=1), backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    same = (y == x).flatten(2).all(dim=2)
    assert same[:, :2].all()
    assert same[:, 5:].all()
    assert not same[:, 2:5].any()
    everything = TurboQuantCodec(CodecSpec(protect_first=3, protect_last=3), backend)
    (z,) = everything.decode(everything.encode([x], layout_of(x, head_dim=64)))
    torch.testing.assert_close(z, x, rtol=0, atol=0)


def test_options_change_the_output(backend: str) -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    base = CodecSpec(key_bits=3, value_bits=3)
    (plain,) = TurboQuantCodec(backend=backend).decode(TurboQuantCodec(base, backend).encode([x], layout))
    for change in (
        {"qjl": True},
        {"seed": 1},
        {"mean": False},
        {"key_rule": "norm"},
        {"fit_range": False},
        {"key_outliers": 2},
    ):
        spec = CodecSpec(**{"key_bits": 3, "value_bits": 3, **change})
        (other,) = TurboQuantCodec(backend=backend).decode(TurboQuantCodec(spec, backend).encode([x], layout))
        assert not torch.equal(other[0], plain[0]), change


def test_qjl_removes_bias_of_inner_products(backend: str) -> None:
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(3)).standard_normal((2, 1, 2048, 64)).astype(np.float32))
    layout = layout_of(x, head_dim=64)
    inner = {}
    for qjl in (False, True):
        spec = CodecSpec(2, 2, mean=False, qjl=qjl, key_rule="lsq")
        (y,) = TurboQuantCodec(backend=backend).decode(TurboQuantCodec(spec, backend).encode([x], layout))
        inner[qjl] = float((y[0] * x[0]).sum() / (x[0] * x[0]).sum())
    assert inner[False] < 0.93  # least squares shrinks
    assert abs(inner[True] - 1) < 0.02


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_write_the_same_bytes(threads: int) -> None:
    x = make_tensor((2, 5, 70, 128))
    layout = layout_of(x, head_dim=64)
    for spec in SPECS:
        one, many = TurboQuantCodec(spec), TurboQuantCodec(spec, threads=threads)
        frame = one.encode([x], layout)
        assert many.encode([x], layout) == frame
        assert torch.equal(many.decode(frame)[0].view(torch.int16), one.decode(frame)[0].view(torch.int16))
    x[1, 4, 3, 2] = torch.inf
    with pytest.raises(NonFiniteError):
        TurboQuantCodec(threads=threads).encode([x], layout)


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, 257])
def test_a_number_of_threads_that_cannot_be(threads: object) -> None:
    with pytest.raises(ConfigError, match="threads"):
        TurboQuantCodec(threads=threads)  # type: ignore[arg-type]


def turning_keys(heads: int = 2) -> torch.Tensor:
    """KV [2, 1, 256, heads * 64] whose K has four channels that turn with the token, 20 times larger."""
    x = make_tensor((2, 1, 256, heads, 64), torch.float32)
    angle = torch.arange(256.0)[:, None] * torch.tensor([0.7, 0.11])
    for head in range(heads):
        x[0, 0, :, head, [3 + head, 9]] += 20 * angle.cos()
        x[0, 0, :, head, [35 + head, 41]] += 20 * angle.sin()
    return x.flatten(3).to(torch.bfloat16)


def test_outlier_channels_keep_the_others_exact_enough(backend: str) -> None:
    x = turning_keys()
    layout = layout_of(x, head_dim=64)
    error = {}
    for count in (0, 2, 4, 8):
        codec = TurboQuantCodec(CodecSpec(key_outliers=count), backend)
        (y,) = codec.decode(codec.encode([x], layout))
        error[count] = (y[0].float() - x[0].float()).pow(2).mean().item()
    assert error[2] < error[0]
    assert error[4] < 0.1 * error[0]
    assert error[8] < error[4]


# --- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [(0, 0, 0, 0), (1, 2, 69, 127), (0, 1, 33, 64)])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_inf_are_refused(backend: str, bad: float, where: tuple, mean: bool, dtype: torch.dtype) -> None:
    x = make_tensor((2, 3, 70, 128), dtype)
    x[where] = bad
    out = bytearray(b"\xaa" * TurboQuantCodec(CodecSpec(mean=mean)).frame_size(layout_of(x, head_dim=64)))
    codec = TurboQuantCodec(CodecSpec(mean=mean), backend)
    with pytest.raises(NonFiniteError):
        codec.encode_into([x], layout_of(x, head_dim=64), out)
    with pytest.raises(ValueError, match="frame"):
        codec.inspect(out)


def test_a_refused_chunk_leaves_no_valid_frame_in_a_misaligned_buffer(backend: str) -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    codec = TurboQuantCodec(backend=backend)
    out = np.zeros(codec.frame_size(layout) + 1, np.uint8)[1:]
    codec.encode_into([x], layout, out)
    codec.inspect(out)
    x[0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError):
        codec.encode_into([x], layout, out)
    with pytest.raises(ValueError, match="frame"):
        codec.inspect(out)


def test_nan_in_fp8_is_refused(backend: str) -> None:
    x = make_tensor((2, 3, 70, 128), torch.float8_e5m2)
    x.view(torch.uint8)[1, 1, 1, 1] = 0x7C  # Inf of e5m2
    with pytest.raises(NonFiniteError):
        TurboQuantCodec(backend=backend).encode([x], layout_of(x, head_dim=64))
    y = make_tensor((2, 3, 70, 128), torch.float8_e4m3fn)
    y.view(torch.uint8)[0, 1, 1, 1] = 0xFF  # NaN of e4m3fn
    with pytest.raises(NonFiniteError):
        TurboQuantCodec(backend=backend).encode([y], layout_of(y, head_dim=64))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_nan_in_a_protected_layer_is_refused(dtype: str) -> None:
    x = make_tensor((2, 3, 4, 64), getattr(torch, dtype))
    codec = TurboQuantCodec(CodecSpec(protect_first=1), "reference")
    codec.encode([x], layout_of(x, head_dim=64))
    for bad in (float("nan"), float("-inf")) if dtype != "float8_e4m3fn" else (float("nan"),):
        y = x.float()
        y[1, 0, 3, 5] = bad
        with pytest.raises(NonFiniteError):
            codec.encode([y.to(x.dtype)], layout_of(x, head_dim=64))


def test_special_vectors_leave_their_neighbours_alone(backend: str) -> None:
    x = make_tensor((2, 1, 70, 4 * 64))
    codec = TurboQuantCodec(CodecSpec(mean=False), backend)
    layout = layout_of(x, head_dim=64)
    (before,) = codec.decode(codec.encode([x], layout))
    special = {
        0: torch.zeros(64),
        1: torch.nn.functional.one_hot(torch.tensor(5), 64).float() * 3,
        2: torch.full((64,), 1e5),
        3: torch.full((64,), 3e38) * torch.tensor([1.0, -1.0]).repeat(32),
        4: torch.full((64,), 1e-38),
        5: torch.linspace(-1e-30, 1e-30, 64),
        6: torch.linspace(-2e30, 2e30, 64),
    }
    for token, value in special.items():
        x[0, 0, token, 64:128] = value.to(torch.bfloat16)
    (after,) = codec.decode(codec.encode([x], layout))
    for token in special:
        wanted, got = x[0, 0, token, 64:128], after[0, 0, token, 64:128]
        assert torch.isfinite(got).all()
        if token == 0:
            assert (got == 0).all()
        else:
            assert relative_mse(got.double() * 1e-30, wanted.double() * 1e-30) < 0.02 if token in (2, 3, 6) else True
            scale = float(wanted.double().abs().max())
            assert relative_mse(got.double() / scale, wanted.double() / scale) < 0.02
        after[0, 0, token, 64:128] = before[0, 0, token, 64:128]
    assert torch.equal(after, before)


def test_constant_channels_come_back_exactly_through_the_mean(backend: str) -> None:
    x = torch.linspace(-3, 3, 128).to(torch.bfloat16).expand(2, 2, 70, 128).contiguous()
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    assert torch.equal(x, y)


def test_a_mean_that_overflows_is_left_out(backend: str) -> None:
    x = torch.full((2, 1, 70, 64), 3e38, dtype=torch.bfloat16)
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    assert torch.isfinite(y).all()
    assert relative_mse(y.double() / 3e38, x.double() / 3e38) < 0.02


@pytest.mark.parametrize("huge", [1e20, 1e24, 1e26, 3e38])
def test_a_huge_token_does_not_silence_the_others(backend: str, huge: float) -> None:
    # It spoils the mean of every channel; the other vectors must then be coded without it.
    x = make_tensor((2, 2, 70, 128))
    x[:, :, 3] = huge
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    others = [t for t in range(70) if t != 3]
    assert relative_mse(y[:, :, others], x[:, :, others]) < 0.009
    assert relative_mse(y[:, :, 3].double() / huge, x[:, :, 3].double() / huge) < 0.02


def test_norms_above_fp16_range(backend: str) -> None:
    x = make_tensor((2, 2, 70, 128)) * 3e4
    codec = TurboQuantCodec(backend=backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=128)))
    assert relative_mse(y, x) < 0.009


def test_fp16_saturates_and_never_overflows(backend: str) -> None:
    x = torch.full((2, 1, 4, 64), 65504.0, dtype=torch.float16)
    x[..., ::2] *= -1
    codec = TurboQuantCodec(CodecSpec(2, 2), backend)
    (y,) = codec.decode(codec.encode([x], layout_of(x, head_dim=64)))
    assert torch.isfinite(y).all()


# --- buffers ----------------------------------------------------------------------------------------------------


def test_every_kind_of_buffer(backend: str, tmp_path: Path) -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    codec = TurboQuantCodec(backend=backend)
    frame = bytes(codec.encode([x], layout))
    (wanted,) = codec.decode(frame)
    path = tmp_path / "frame"
    path.write_bytes(frame)
    shifted = np.zeros(len(frame) + 1, np.uint8)
    shifted[1:] = np.frombuffer(frame, np.uint8)
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)
        for source in (bytearray(frame), memoryview(frame), view, shifted[1:], torch.from_numpy(shifted[1:])):
            (got,) = codec.decode(source)
            assert torch.equal(got, wanted)
        del source
        view.release()
    for target in (
        bytearray(len(frame) + 9),
        np.zeros(len(frame) + 1, np.uint8)[1:],
        torch.zeros(len(frame) + 64, dtype=torch.uint8),
    ):
        n = codec.encode_into([x], layout, target)
        assert (
            bytes(target[:n]) == frame if not isinstance(target, torch.Tensor) else bytes(target.numpy()[:n]) == frame
        )


def test_encoding_leaves_what_lies_behind_the_frame(backend: str) -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    codec = TurboQuantCodec(backend=backend)
    out = bytearray(b"\x5a" * (codec.frame_size(layout) + 100))
    n = codec.encode_into([x], layout, out)
    assert out[n:] == b"\x5a" * 100


def test_a_source_that_is_not_contiguous_gives_the_same_frame(backend: str) -> None:
    x = make_tensor((2, 2, 70, 128))
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    codec = TurboQuantCodec(backend=backend)
    layout = layout_of(x, head_dim=64)
    assert codec.encode([strided], layout) == codec.encode([x], layout)
    with pytest.raises(LayoutError, match="contiguous"):
        codec.decode_into(codec.encode([x], layout), [strided])


def test_wrong_calls_are_named() -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    codec = TurboQuantCodec()
    with pytest.raises(LayoutError, match="the output has 10 bytes"):
        codec.encode_into([x], layout, bytearray(10))
    with pytest.raises(LayoutError, match="read-only"):
        codec.encode_into([x], layout, bytes(codec.frame_size(layout)))
    with pytest.raises(LayoutError, match="groups 2"):
        codec.encode([x, x], layout)
    with pytest.raises(LayoutError, match="shape"):
        codec.encode([x[:, :1]], layout)
    with pytest.raises(LayoutError, match="dtype"):
        codec.encode([x.float()], layout)
    with pytest.raises(LayoutError, match="digest"):
        codec.encode([x], layout, key=b"short")
    with pytest.raises(LayoutError, match="buffer"):
        codec.decode("text")


# --- identity of the frame --------------------------------------------------------------------------------------


def test_another_key_model_shape_or_dtype_is_a_mismatch_and_writes_nothing() -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    key, model = cache_key_digest(b"chunk", "model", 0), model_fingerprint("model")
    codec = TurboQuantCodec()
    frame = codec.encode([x], layout, key=key, model=model)
    target = torch.full_like(x, 7)
    codec.decode_into(frame, [target.clone()], key=key, model=model, layout=layout)

    other = GroupLayout.infer((2, 2, 70, 256), torch.bfloat16, head_dim=128)
    tries = [
        ("mismatch_key", [target], {"key": cache_key_digest(b"chunk", "model", 1)}),
        ("mismatch_model", [target], {"model": model_fingerprint("other")}),
        ("mismatch_shape", [target[:, :1].contiguous()], {}),
        ("mismatch_shape", [target], {"layout": ChunkLayout((other,))}),
        ("mismatch_dtype", [target.half()], {}),
        ("mismatch_groups", [target, target], {}),
    ]
    for reason, tensors, expected in tries:
        copies = [t.clone() for t in tensors]
        with pytest.raises(FrameMismatchError) as caught:
            codec.decode_into(frame, copies, **expected)
        assert caught.value.reason == reason
        assert all(torch.equal(a, b) for a, b in zip(copies, tensors, strict=True))


def test_a_frame_of_other_settings_is_decoded_by_its_own_header() -> None:
    x = make_tensor((2, 2, 70, 128))
    layout = layout_of(x, head_dim=64)
    frame = TurboQuantCodec(CodecSpec(8, 8, seed=5)).encode([x], layout)
    (y,) = TurboQuantCodec(CodecSpec(2, 2)).decode(frame)
    assert relative_mse(y, x) < 1e-3


def test_key_digests_tell_fields_and_types_apart() -> None:
    digests = {
        cache_key_digest(b"ab", "c"), cache_key_digest(b"a", "bc"), cache_key_digest(b"abc"), cache_key_digest("1"),
        cache_key_digest(1), cache_key_digest(b"1"), cache_key_digest(),
    }  # fmt: skip
    assert len(digests) == 7
    assert {len(d) for d in digests} == {16}


# --- sizes ------------------------------------------------------------------------------------------------------


def test_the_size_is_a_function_of_layout_and_spec() -> None:
    codec = TurboQuantCodec()
    for seed in range(3):
        x = make_tensor((2, 2, 70, 128), seed=seed) * 10**seed
        layout = layout_of(x, head_dim=64)
        frame = codec.encode([x], layout, key=cache_key_digest(seed), model=model_fingerprint("m" * seed))
        assert len(frame) == codec.frame_size(layout)


@pytest.mark.parametrize(("bits", "ratio"), [(4, 3.8), (3, 4.99), (8, 1.95)])
def test_stored_size_at_head_dim_128(bits: int, ratio: float) -> None:
    x = make_tensor((8, 256, 4 * 256))
    layout = layout_of(x, head_dim=128, latent=False)
    frame = TurboQuantCodec(CodecSpec(bits, bits)).encode([x], layout)
    assert layout.nbytes / len(frame) >= ratio


def test_three_bit_codes_take_three_bits() -> None:
    layout = ChunkLayout((GroupLayout.infer((32, 256, 2048), "bfloat16", head_dim=128, latent=False),))
    three, four = (TurboQuantCodec(CodecSpec(b, b)).frame_size(layout) for b in (3, 4))
    assert four - three == 32 * 256 * 2048 // 8


# --- backends ---------------------------------------------------------------------------------------------------


def test_backend_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_backend("reference").name == "reference"
    monkeypatch.setenv(BACKEND_ENV, "reference")
    assert get_backend().name == "reference"
    assert get_backend("numba").name == "numba"
    monkeypatch.setenv(BACKEND_ENV, "gpu")
    with pytest.raises(ConfigError, match=r"TQ_OFFLOAD_BACKEND='gpu'.*auto, numba, reference"):
        get_backend()
    monkeypatch.delenv(BACKEND_ENV)
    assert get_backend().name == "numba"
