"""What a chunk is: tensors of known shapes, cut into vectors of K and of V (docs/wire-format.md, section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tq_offload.errors import LayoutError

__all__ = ["CODED_DTYPES", "KINDS", "MAX_HEAD_DIM", "ChunkLayout", "GroupLayout", "Stream", "dtype_name", "safe_dim"]

KINDS = ("kv_first", "packed", "latent", "kv_token", "token_kv", "opaque")
MAX_HEAD_DIM = 1024
MAX_RANK = 8
MAX_SIZE = 1 << 40  # of a dimension
CODED_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")

_ITEM_SIZES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float64": 8, "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2,
    "uint32": 4, "int32": 4, "uint64": 8, "int64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Stream:
    """A regular grid of vectors in a flat buffer.

    Vector (p, t, j) starts at element `offset + p*plane_stride + t*token_stride + j*vector_stride` and has `dim`
    contiguous elements. All strides are in elements.
    """

    planes: int
    tokens: int
    vectors: int
    dim: int
    offset: int
    plane_stride: int
    token_stride: int
    vector_stride: int


def dtype_name(dtype: object) -> str:
    """`torch.bfloat16` or `"bfloat16"` to `"bfloat16"`, without importing torch."""
    return str(dtype).removeprefix("torch.")


def safe_dim(channels: int) -> int:
    """A vector size for `channels` contiguous elements whose heads are not known; 0 if there is none.

    A power of two up to 64 lies inside one head of every common model, so that K and V are not mixed.
    """
    for dim in (64, 32, 16):
        if channels % dim == 0:
            return dim
    for dim in range(128, 15, -1):
        if channels % dim == 0:
            return dim
    return channels if 0 < channels <= MAX_HEAD_DIM else 0


@dataclass(frozen=True)
class GroupLayout:
    """One contiguous tensor of a chunk.

    Args:
        kind: One of `KINDS`.
        shape: Shape of the tensor; see the table of kinds.
        dtype: torch name of its dtype, without the prefix.
        head_dim: D, elements of a vector; 0 for `opaque`.

    Raises:
        LayoutError: The four do not fit together.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    head_dim: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise LayoutError(f"unknown layout kind {self.kind!r}; known: {', '.join(KINDS)}")
        if any(type(n) is not int for n in (*self.shape, self.head_dim)):
            raise LayoutError(f"shape {self.shape} and head_dim {self.head_dim!r} must be integers")
        if len(self.shape) > MAX_RANK or any(not 0 <= n <= MAX_SIZE for n in self.shape):
            raise LayoutError(f"shape {self.shape} is not a tensor of at most {MAX_RANK} dimensions")
        if self.dtype not in _ITEM_SIZES:
            raise LayoutError(f"dtype {self.dtype!r} is not supported; supported: {', '.join(_ITEM_SIZES)}")
        if self.kind == "opaque":
            if self.head_dim:
                raise LayoutError("an opaque group has no head_dim")
            return
        if self.dtype not in CODED_DTYPES:
            raise LayoutError(f"dtype {self.dtype!r} is stored as it is: use the kind 'opaque'")
        self._check_vectors()

    def _check_vectors(self) -> None:
        rank, lead = len(self.shape), self.shape[0] if self.shape else 0
        fits = {
            "kv_first": rank == 4 and lead == 2,
            "packed": rank == 3 or (rank == 4 and lead == 1),
            "latent": rank == 3 or (rank == 4 and lead == 1),
            "kv_token": rank == 3 and lead == 2,
            "token_kv": rank == 3 and self.shape[1] == 2,
        }[self.kind]
        if not fits:
            raise LayoutError(f"shape {self.shape} is not of the kind {self.kind!r}")
        if not 1 <= self.head_dim <= MAX_HEAD_DIM:
            raise LayoutError(f"head_dim {self.head_dim} is not in 1..{MAX_HEAD_DIM}")
        unit = 2 * self.head_dim if self.kind == "packed" else self.head_dim
        if self.shape[-1] % unit:
            raise LayoutError(f"{self.shape[-1]} channels are not a multiple of {unit} (head_dim {self.head_dim})")

    @classmethod
    def infer(
        cls,
        shape: Sequence[int],
        dtype: object,
        *,
        head_dim: int | None = None,
        latent: bool | None = None,
        kind: str | None = None,
    ) -> GroupLayout:
        """The layout of a tensor of LMCache, from what is known about the model.

        Args:
            shape: Shape of the tensor.
            dtype: torch dtype or its name.
            head_dim: Elements of a K or V vector; None if not known: vectors of a safe size are used.
            latent: True for an MLA latent, False for K and V packed in one axis, None if not known.
            kind: The kind where the caller knows it (LMCache's memory format); None: from the rank.

        Returns:
            A layout that can be coded; `opaque` for what is not KV of a known form. A head_dim that does not divide
            the channels is treated as not known.
        """
        shape, name = tuple(int(n) for n in shape), dtype_name(dtype)
        if kind is None:
            kind = _kind_of_rank(shape)
        if kind == "opaque" or name not in CODED_DTYPES:
            return cls("opaque", shape, name)
        channels = shape[-1]
        if kind == "packed":
            if latent is False and head_dim and head_dim <= MAX_HEAD_DIM and channels % (2 * head_dim) == 0:
                return cls("packed", shape, name, head_dim)
            kind = "latent"
            if latent is not True:
                head_dim = None
            elif head_dim is None and channels <= MAX_HEAD_DIM:
                head_dim = channels
        usable = head_dim and head_dim <= MAX_HEAD_DIM and channels % head_dim == 0
        dim = head_dim if usable and head_dim else safe_dim(channels)
        return cls(kind, shape, name, dim) if dim else cls("opaque", shape, name)

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return _ITEM_SIZES[self.dtype]

    @property
    def layered(self) -> bool:
        """True if the planes are the layers of the model, so that the first and last can be protected."""
        return self.kind in ("kv_first", "packed", "latent")

    def streams(self) -> dict[str, Stream]:
        """The vectors of K, and of V where the kind has V, as grids. Empty for `opaque`."""
        d = self.head_dim
        if self.kind == "opaque":
            return {}
        channels = self.shape[-1]
        if self.kind == "token_kv":
            tokens = self.shape[0]
            return {
                "K": Stream(1, tokens, channels // d, d, 0, 0, 2 * channels, d),
                "V": Stream(1, tokens, channels // d, d, channels, 0, 2 * channels, d),
            }
        tokens = self.shape[-2]
        plane = tokens * channels
        if self.kind in ("kv_first", "kv_token"):
            layers = self.shape[1] if self.kind == "kv_first" else 1
            return {
                "K": Stream(layers, tokens, channels // d, d, 0, plane, channels, d),
                "V": Stream(layers, tokens, channels // d, d, layers * plane, plane, channels, d),
            }
        layers = self.shape[-3]
        if self.kind == "packed":
            heads = channels // (2 * d)
            return {
                "K": Stream(layers, tokens, heads, d, 0, plane, channels, 2 * d),
                "V": Stream(layers, tokens, heads, d, d, plane, channels, 2 * d),
            }
        return {"K": Stream(layers, tokens, channels // d, d, 0, plane, channels, d)}


@dataclass(frozen=True)
class ChunkLayout:
    """The groups of a chunk, in the order in which LMCache holds them. Hybrid models have several."""

    groups: tuple[GroupLayout, ...]

    @property
    def nbytes(self) -> int:
        """Size of the chunk in bytes, uncompressed."""
        return sum(group.nbytes for group in self.groups)


def _kind_of_rank(shape: tuple[int, ...]) -> str:
    if len(shape) == 4 and shape[0] == 2:
        return "kv_first"
    if len(shape) == 3 or (len(shape) == 4 and shape[0] == 1):
        return "packed"
    return "opaque"
