"""The reference backend: `tq_offload.quantizer` over the streams of a chunk. Slow, and always right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tq_offload.errors import NonFiniteError
from tq_offload.frame import StreamPlan
from tq_offload.kernels.base import (
    Array,
    Chunks,
    Decoder,
    FiniteCheck,
    Sections,
    SectionsCoder,
    Stream,
    StreamCoder,
    VectorParams,
    check_finite,
    decode_each,
)
from tq_offload.outliers import Outliers, add_coarse, split_outliers, take_coarse
from tq_offload.quantizer import EncodedVectors, chunk_mean, decode_vectors, encode_vectors, to_bf16_bits

__all__ = ["ReferenceBackend"]


def _vectors(flat: Array, stream: Stream, dtype: torch.dtype) -> torch.Tensor:
    """View of the stream's vectors, [P, T, J, D] of `dtype`, over the group's flat bits."""
    size = (stream.planes, stream.tokens, stream.vectors, stream.dim)
    strides = (stream.plane_stride, stream.token_stride, stream.vector_stride, 1)
    signed = flat.view(np.int16) if flat.dtype == np.uint16 else flat
    return torch.from_numpy(signed).view(dtype).as_strided(size, strides, stream.offset)


def _mean_of_each(mean: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Means [P, J, D] repeated for every vector: [P*T*J, D]."""
    shape = (stream.planes, stream.tokens, stream.vectors, stream.dim)
    return mean[:, None].expand(shape).reshape(-1, stream.dim)


class ReferenceBackend:
    """`Backend` in pure torch; one thread, whole-stream temporaries."""

    name = "reference"

    def encode(self, src: Array, stream: Stream, params: VectorParams, out: Sections) -> None:
        """See `Backend.encode`."""
        if not stream.planes * stream.tokens * stream.vectors:
            return
        writable = src if src.flags.writeable else src.copy()
        v = _vectors(writable, stream, getattr(torch, params.dtype)).to(torch.float32)
        if not bool(torch.isfinite(v).all()):
            raise NonFiniteError("NaN or Inf in the KV chunk")
        apart = None
        if out.outlier_channels is not None and out.outlier_ranges is not None and out.outlier_codes is not None:
            apart = split_outliers(v, params.outliers)
            out.outlier_channels[...], out.outlier_ranges[...] = apart.channels, apart.ranges
            out.outlier_codes[...] = apart.codes
        mean = None
        if params.mean and out.means is not None:
            per_channel = chunk_mean(v)
            if apart is not None:
                per_channel = per_channel.scatter(-1, torch.from_numpy(apart.channels.astype(np.int64)), 0.0)
            out.means[...] = to_bf16_bits(per_channel)
            mean = _mean_of_each(per_channel, stream)
        if apart is not None:
            v = take_coarse(v, apart)
        e = encode_vectors(
            v.reshape(-1, stream.dim),
            mean,
            bits=params.bits,
            seed=params.seed,
            rule=params.rule,
            fit_range=params.fit_range,
            qjl=params.qjl,
        )
        out.scales[...] = e.scales.reshape(out.scales.shape)
        out.codes[...] = e.codes.reshape(out.codes.shape)
        if out.sketch is not None and e.sketch is not None:
            out.sketch[...] = e.sketch.reshape(out.sketch.shape)
        if out.sketch_scales is not None and e.sketch_scales is not None:
            out.sketch_scales[...] = e.sketch_scales.reshape(out.sketch_scales.shape)

    def decode(self, dst: Array, stream: Stream, params: VectorParams, sections: Sections) -> None:
        """See `Backend.decode`."""
        if not stream.planes * stream.tokens * stream.vectors:
            return
        dtype = getattr(torch, params.dtype)
        e = EncodedVectors(
            sections.scales.reshape(-1),
            sections.codes.reshape(-1, sections.codes.shape[-1]),
            None if sections.sketch_scales is None else sections.sketch_scales.reshape(-1),
            None if sections.sketch is None else sections.sketch.reshape(-1, sections.sketch.shape[-1]),
        )
        mean = None
        if params.mean and sections.means is not None:
            values = (sections.means.astype(np.uint32) << 16).view(np.float32)
            mean = _mean_of_each(torch.from_numpy(values), stream)
        out = decode_vectors(e, mean, dim=stream.dim, bits=params.bits, seed=params.seed)
        view = _vectors(dst, stream, dtype)
        out = out.reshape(view.shape)
        channels, ranges, codes = sections.outlier_channels, sections.outlier_ranges, sections.outlier_codes
        if channels is not None and ranges is not None and codes is not None:
            out = add_coarse(out, Outliers(channels, ranges, codes))
        top = torch.finfo(dtype).max
        view.copy_(out.clamp(-top, top).to(dtype))

    def coder(self, plan: StreamPlan, params: VectorParams) -> StreamCoder:
        """See `Backend.coder`."""
        return SectionsCoder(self, plan, params)

    def finite_check(self, places: Array) -> FiniteCheck:
        """See `Backend.finite_check`."""
        return check_finite(places)

    def decoder(self, dim: int, chunks: Sequence[Chunks]) -> Decoder:
        """See `Backend.decoder`."""
        return decode_each(self, dim, chunks)
