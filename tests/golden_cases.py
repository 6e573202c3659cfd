"""The chunks behind the golden frames: portable data, one case for each feature of the format."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from support import make_tensor

from tq_offload.codec import cache_key_digest, model_fingerprint
from tq_offload.layout import ChunkLayout, GroupLayout
from tq_offload.spec import PRESETS, CodecSpec

# name: spec, then (shape, dtype, what is known) of every group
CASES: dict[str, tuple[CodecSpec, list[tuple[tuple[int, ...], str, dict]]]] = {
    "default_kv_first_64": (CodecSpec(), [((2, 2, 70, 128), "bfloat16", {"head_dim": 64})]),
    "default_packed_128": (CodecSpec(), [((2, 66, 512), "bfloat16", {"head_dim": 128, "latent": False})]),
    "latent_576": (CodecSpec(), [((1, 1, 65, 576), "bfloat16", {"latent": True})]),
    "layerwise_80": (CodecSpec(3, 5), [((2, 33, 160), "float16", {"head_dim": 80, "kind": "kv_token"})]),
    "token_kv_96_qjl": (CodecSpec(2, 2, qjl=True), [((9, 2, 96), "float32", {"head_dim": 96, "kind": "token_kv"})]),
    "bits_8_1_seed": (CodecSpec(8, 1, seed=4294967295), [((2, 2, 17, 127), "bfloat16", {"head_dim": 127})]),
    "rules_no_mean_no_fit": (
        CodecSpec(6, 7, mean=False, fit_range=False, key_rule="unbiased", value_rule="norm"),
        [((2, 1, 64, 64), "bfloat16", {"head_dim": 64})],
    ),
    "protected_fp8": (
        CodecSpec(protect_first=1, protect_last=1),
        [((3, 8, 256), "float8_e4m3fn", {"head_dim": 64, "latent": False})],
    ),
    "hybrid_groups": (
        CodecSpec(),
        [
            ((2, 8, 256), "bfloat16", {"head_dim": 64, "latent": False}),
            ((3, 40), "uint8", {}),
            ((2, 1, 8, 72), "float8_e5m2", {"head_dim": 36}),
            ((2, 1, 0, 64), "bfloat16", {"head_dim": 64}),
        ],
    ),
    "outliers_fp16_odd": (CodecSpec(3, 4, key_outliers=3), [((1, 2, 67, 160), "float16", {"head_dim": 40})]),
    "outliers_qjl_short": (
        CodecSpec(2, 2, qjl=True, key_outliers=8, key_rule="unbiased"),
        [((2, 2, 3, 96), "float32", {"head_dim": 96})],
    ),
    "outliers_96_bits_8_3": (CodecSpec(8, 3, key_outliers=4), [((2, 2, 67, 192), "bfloat16", {"head_dim": 96})]),
    "no_mean_192": (CodecSpec(4, 3, mean=False, key_rule="norm"), [((2, 2, 9, 192), "float32", {"head_dim": 192})]),
    "latent_4d": (CodecSpec(), [((1, 2, 9, 64), "bfloat16", {"latent": True})]),
    "packed_4d": (CodecSpec(), [((1, 2, 9, 256), "bfloat16", {"head_dim": 64, "latent": False})]),
}
CASES |= {f"preset_{name}": (spec, [((2, 2, 66, 128), "bfloat16", {"head_dim": 64})]) for name, spec in PRESETS.items()}


@dataclass(frozen=True)
class Case:
    """One chunk with its spec, layout and digests."""

    spec: CodecSpec
    tensors: list[torch.Tensor]
    layout: ChunkLayout
    key: bytes
    model: bytes

    @staticmethod
    def digest_of(tensor: torch.Tensor) -> str:
        """BLAKE2b of a tensor's bytes."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return hashlib.blake2b(data, digest_size=16).hexdigest()


def make_case(name: str) -> Case:
    """Build the chunk of that name."""
    spec, groups = CASES[name]
    tensors, layouts = [], []
    for i, (shape, dtype, known) in enumerate(groups):
        x = make_tensor(shape, torch.float32, seed=i)
        target = getattr(torch, dtype)
        tensors.append((x.abs() * 40).to(target) if dtype == "uint8" else x.to(target))
        layouts.append(GroupLayout.infer(shape, target, **known))
    return Case(spec, tensors, ChunkLayout(tuple(layouts)), cache_key_digest(name), model_fingerprint("golden"))
