"""What the guard found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tq_offload.check.memory import MemoryRow
from tq_offload.check.profile import LayerProfile
from tq_offload.check.scoring import Comparison, LayerError
from tq_offload.errors import CheckError
from tq_offload.spec import CodecSpec

__all__ = ["Bounds", "PresetResult", "Report", "summary"]

SUFFERS = 2.0
"""Times the median of the layers' attention errors from which a layer is named."""


@dataclass(frozen=True)
class Bounds:
    """What a preset may do: KL in nats a token, and the relative change of the perplexity in either direction.

    Raises:
        CheckError: A bound that is not positive.
    """

    kl: float = 0.005
    perplexity: float = 0.02

    def __post_init__(self) -> None:
        for name, value in (("--max-kl", self.kl), ("--max-ppl", self.perplexity)):
            if not value > 0:
                raise CheckError(f"{name} {value:g}: a bound is a number above 0")


@dataclass(frozen=True)
class PresetResult:
    """A preset on a model.

    `bits`: an element, as stored, frames included. `kl`: mean KL to the unquantised prediction in nats a token;
    `perplexity`: its relative change; `kl_error`, `perplexity_error`: their standard errors. `top1`: share of tokens
    whose most probable successor stays. `layers`: means over the windows. `suffering`: layers whose attention error is
    at least twice the median. `fits`: within the bounds. `near`: a figure is within two standard errors of its bound,
    so other tokens could decide otherwise.
    """

    name: str
    spec: CodecSpec
    bits: float
    kl: float
    kl_error: float
    perplexity: float
    perplexity_error: float
    top1: float
    layers: list[LayerError]
    suffering: list[int]
    fits: bool
    near: bool


@dataclass(frozen=True)
class Report:
    """A checked model.

    `own_text`: False: the text that ships with the package was read. `shapes`: KV heads and head_dim of every layer of
    full attention. `perplexity`: unquantised, of the scored tokens. `presets`: cheapest first. `recommended`: the
    cheapest one that fits; None: none does. `best`: the one of least KL. `memory`: bytes with the recommended preset,
    else with the best one.
    """

    model: str
    own_text: bool
    shapes: list[tuple[int, int]]
    perplexity: float
    prefix: int
    tokens: int
    windows: int
    chunk_tokens: int
    bounds: Bounds
    presets: list[PresetResult]
    profile: list[LayerProfile]
    findings: list[str]
    recommended: str | None
    best: str
    memory: list[MemoryRow] = field(default_factory=list)

    def result(self, name: str) -> PresetResult:
        """The result of a preset."""
        return next(r for r in self.presets if r.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON takes it; a value that could not be measured is None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def summary(
    name: str,
    spec: CodecSpec,
    bits: float,
    parts: Sequence[Comparison],
    layers: Sequence[Sequence[LayerError]],
    bounds: Bounds,
) -> PresetResult:
    """One preset over all windows.

    Args:
        name: Of the preset.
        spec: Of the preset.
        bits: An element, as stored.
        parts: Comparisons of the windows.
        layers: Layer errors of the windows.
        bounds: What may be.
    """
    kl = torch.cat([p.kl for p in parts]).double()
    loss = torch.cat([p.loss_change for p in parts]).double()
    mean_kl, perplexity = kl.mean().item(), math.exp(loss.mean().item()) - 1
    kl_error, perplexity_error = _error(kl), _error(loss) * (1 + perplexity)
    kl_room, perplexity_room = bounds.kl - mean_kl, bounds.perplexity - abs(perplexity)
    errors = [_mean(window) for window in zip(*layers, strict=True)]
    return PresetResult(
        name=name, spec=spec, bits=bits, kl=mean_kl, kl_error=kl_error, perplexity=perplexity,
        perplexity_error=perplexity_error, top1=torch.cat([p.top1 for p in parts]).mean().item(),
        layers=errors, suffering=_suffering(errors), fits=min(kl_room, perplexity_room) >= 0,
        near=abs(kl_room) < 2 * kl_error or abs(perplexity_room) < 2 * perplexity_error,
    )  # fmt: skip


def _error(x: torch.Tensor) -> float:
    """Standard error of the mean; 0 of a single value."""
    return x.std().item() / math.sqrt(x.numel()) if x.numel() > 1 else 0.0


def _mean(errors: Sequence[LayerError]) -> LayerError:
    """Of the same layer in several windows."""
    return LayerError(
        errors[0].layer, *(statistics.fmean(getattr(e, n) for e in errors) for n in ("key", "value", "attention"))
    )


def _suffering(errors: Sequence[LayerError]) -> list[int]:
    known = [e for e in errors if not math.isnan(e.attention)]
    if not known:
        return []
    median = statistics.median(e.attention for e in known)
    hit = [e for e in known if e.attention >= SUFFERS * median > 0]
    return [e.layer for e in sorted(hit, key=lambda e: e.attention, reverse=True)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
