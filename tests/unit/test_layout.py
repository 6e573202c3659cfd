import numpy as np
import pytest
import torch

from tq_offload.errors import LayoutError
from tq_offload.layout import GroupLayout, Stream, safe_dim

L, T, H, D = 3, 5, 2, 16


def elements(stream: Stream) -> set[int]:
    index = (
        stream.offset
        + np.arange(stream.planes)[:, None, None, None] * stream.plane_stride
        + np.arange(stream.tokens)[:, None, None] * stream.token_stride
        + np.arange(stream.vectors)[:, None] * stream.vector_stride
        + np.arange(stream.dim)
    )
    return set(index.ravel().tolist())


CASES = {
    "kv_first": (2, L, T, H * D),
    "packed": (L, T, H * 2 * D),
    "packed4": (1, L, T, H * 2 * D),
    "latent": (1, L, T, H * D),
    "kv_token": (2, T, H * D),
    "token_kv": (T, 2, H * D),
}


@pytest.mark.parametrize("name", CASES)
def test_streams_cover_every_element_once(name: str) -> None:
    kind, shape = name.rstrip("4"), CASES[name]
    parts = [elements(s) for s in GroupLayout(kind, shape, "bfloat16", D).streams().values()]
    assert set.union(*parts) == set(range(int(np.prod(shape))))
    assert sum(map(len, parts)) == int(np.prod(shape))


@pytest.mark.parametrize("name", CASES)
def test_streams_are_k_and_v(name: str) -> None:
    kind, shape = name.rstrip("4"), CASES[name]
    group = GroupLayout(kind, shape, "bfloat16", D)
    is_value = torch.zeros(shape, dtype=torch.bool)
    if kind in ("kv_first", "kv_token"):
        is_value[1] = True
    elif kind == "packed":
        is_value.view(-1, H, 2, D)[:, :, 1] = True
    elif kind == "token_kv":
        is_value[:, 1] = True
    wanted = set(torch.nonzero(is_value.flatten()).flatten().tolist())
    assert elements(group.streams().get("V", Stream(0, 0, 0, 0, 0, 0, 0, 0))) == wanted


def test_which_it_is_comes_from_the_model_never_from_dimension_0() -> None:
    latent = GroupLayout.infer((1, L, T, 576), torch.bfloat16, latent=True)
    packed = GroupLayout.infer((1, L, T, 576), torch.bfloat16, head_dim=96, latent=False)
    unknown = GroupLayout.infer((1, L, T, 576), torch.bfloat16)
    assert (latent.kind, latent.head_dim) == ("latent", 576)
    assert (packed.kind, packed.head_dim) == ("packed", 96)
    assert (unknown.kind, unknown.head_dim) == ("latent", 64)


@pytest.mark.parametrize(
    ("shape", "dtype", "known", "kind", "dim"),
    [
        ((2, L, T, 1024), torch.bfloat16, {"head_dim": 128}, "kv_first", 128),
        ((2, L, T, 1024), torch.bfloat16, {}, "kv_first", 64),
        ((2, L, T, 1024), torch.bfloat16, {"head_dim": 96}, "kv_first", 64),
        ((L, T, 1024), torch.float16, {"head_dim": 128, "latent": False}, "packed", 128),
        ((L, T, 1024), torch.float16, {"head_dim": 384, "latent": False}, "latent", 64),
        ((L, T, 1024), torch.float16, {"head_dim": 128}, "latent", 64),
        ((L, T, 1152), torch.bfloat16, {"latent": True}, "latent", 64),
        ((L, T, 127), torch.bfloat16, {}, "latent", 127),
        ((L, T, 1031), torch.bfloat16, {}, "opaque", 0),
        ((L, T, 1024), torch.uint8, {"head_dim": 128}, "opaque", 0),
        ((L, T), torch.bfloat16, {}, "opaque", 0),
        ((3, L, T, 64), torch.bfloat16, {}, "opaque", 0),
        ((T, 2, 64), torch.bfloat16, {"kind": "token_kv", "head_dim": 32}, "token_kv", 32),
        ((2, T, 64), torch.bfloat16, {"kind": "kv_token", "head_dim": 32}, "kv_token", 32),
        ((L, T, 256), torch.float8_e4m3fn, {"head_dim": 128, "latent": False}, "packed", 128),
    ],
)
def test_infer(shape: tuple[int, ...], dtype: torch.dtype, known: dict, kind: str, dim: int) -> None:
    group = GroupLayout.infer(shape, dtype, **known)
    assert (group.kind, group.head_dim) == (kind, dim)


@pytest.mark.parametrize(
    ("channels", "dim"), [(128, 64), (576, 64), (160, 32), (80, 16), (120, 120), (127, 127), (1016, 127), (14, 14)]
)
def test_safe_dim(channels: int, dim: int) -> None:
    assert safe_dim(channels) == dim
    assert channels % dim == 0


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "dim"),
    [
        ("nonsense", (2, L, T, 64), "bfloat16", 64),
        ("kv_first", (3, L, T, 64), "bfloat16", 64),
        ("kv_first", (2, T, 64), "bfloat16", 64),
        ("packed", (2, L, T, 128), "bfloat16", 64),
        ("packed", (L, T, 192), "bfloat16", 64),
        ("latent", (L, T, 100), "bfloat16", 64),
        ("latent", (L, T, 2048), "bfloat16", 2048),
        ("latent", (L, T, 64), "bfloat16", 0),
        ("token_kv", (T, 3, 64), "bfloat16", 64),
        ("latent", (L, T, 64), "uint8", 64),
        ("opaque", (L, T, 64), "uint8", 64),
        ("opaque", (L, T, 64), "int4", 0),
        ("opaque", (-1, T), "uint8", 0),
        ("opaque", (1,) * 9, "uint8", 0),
        ("opaque", (1 << 41, 0), "uint8", 0),
        ("latent", (L, T, 64.0), "bfloat16", 64),
        ("latent", (L, T, 64), "bfloat16", 64.0),
        ("latent", (L, T, 64), "bfloat16", True),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, shape: tuple[int, ...], dtype: str, dim: int) -> None:
    with pytest.raises(LayoutError):
        GroupLayout(kind, shape, dtype, dim)
