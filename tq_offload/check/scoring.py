"""What replaced K and V of a prefix do to the predictions of a transformers model and to its layers of attention."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tq_offload.check.attention import AttentionCall, recorded_attention
from tq_offload.check.frames import through_frames
from tq_offload.errors import CacheTypeError, NonFiniteError
from tq_offload.hf_compat import layer_kind, model_keyword

__all__ = ["Comparison", "LayerError", "Window", "layer_errors", "through_frames"]


@dataclass(frozen=True)
class Comparison:
    """Scored tokens with replaced K and V against the same tokens without, each f32 [S].

    `kl`: KL divergence from the unquantised prediction, nats. `loss_change`: change of the loss, nats. `top1`: 1 where
    the most probable token is the same.
    """

    kl: torch.Tensor
    loss_change: torch.Tensor
    top1: torch.Tensor


@dataclass(frozen=True)
class LayerError:
    """What replaced K and V do to one layer.

    `layer`: its index in the model. `key`: error energy over energy of K centred over the tokens (softmax does not see
    what all keys share). `value`: error energy over energy of V. `attention`: norm of the error of the attention output
    of the scored tokens over the norm of that output; NaN where the layer's attention could not be recorded.
    """

    layer: int
    key: float
    value: float
    attention: float


class Window:
    """An unquantised run of a model over a prefix of P tokens and the S tokens after it.

    Args:
        model: A causal language model of transformers with K and V in layers of full attention.
        ids: i64 [1, P + S + 1]; the last token is only a target.
        prefix: P.

    Attributes:
        layers: Indices of the layers of full attention, L of them. Sliding windows and linear layers stay as they are.
        keys: K of each of `layers`, [1, H, P, D]; `values`: V likewise.
        expected: f32 [S, V], log probabilities of the tokens after the prefix.
        loss: f32 [S], nats.
        calls: Attention calls of the scored tokens, by the index of their layer.

    Raises:
        CacheTypeError: The model has no layer of full attention with a cache, or takes no cache.
        NonFiniteError: K, V or the predictions are NaN or Inf.
    """

    def __init__(self, model: Any, ids: torch.Tensor, prefix: int) -> None:
        self.model, self.ids, self.prefix = model, ids, prefix
        self._keyword = _cache_keyword(model)
        cache = _empty_cache(model)
        self._forward(ids[:, :prefix], cache, last_only=True)
        self.layers = [i for i, layer in enumerate(cache.layers) if layer_kind(layer) == "full" and _filled(layer)]
        if not self.layers:
            raise _no_cache(model)
        self.keys: list[torch.Tensor] = [cache.layers[i].keys for i in self.layers]
        self.values: list[torch.Tensor] = [cache.layers[i].values for i in self.layers]
        for i in self.layers:  # K and V are kept once; the other layers of a hybrid model are copied for every score
            cache.layers[i] = type(cache.layers[i])()
        self._rest = cache
        self._check_finite()
        with recorded_attention(model, prefix) as calls:
            self.expected = self.score(self.keys, self.values)
        self.calls = self._calls_on_the_cache(calls)
        self.loss = self._loss(self.expected)
        if not bool(self.loss.isfinite().all()):
            raise NonFiniteError("the model's predictions are NaN or Inf: load it in another dtype")

    def score(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Log probabilities f32 [S, V] with other K and V of the prefix, each [1, H, P, D], one a layer of `layers`."""
        cache = copy.deepcopy(self._rest)
        for i, k, v in zip(self.layers, keys, values, strict=True):
            cache.update(k, v, i)
        return torch.log_softmax(self._forward(self.ids[:, self.prefix : -1], cache)[0].float(), dim=-1)

    def compare(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Comparison:
        """`score`, against the unquantised prediction."""
        scores = self.score(keys, values)
        kl = (self.expected.exp() * (self.expected - scores)).sum(dim=-1)
        top1 = (scores.argmax(-1) == self.expected.argmax(-1)).float()
        return Comparison(kl.cpu(), (self._loss(scores) - self.loss).cpu(), top1.cpu())

    def _forward(self, ids: torch.Tensor, cache: Any, *, last_only: bool = False) -> torch.Tensor:
        """Logits [1, n, V]; only those of the last token where the model can and they are enough."""
        parameters = inspect.signature(self.model.forward).parameters
        kwargs = {"logits_to_keep": 1} if last_only and "logits_to_keep" in parameters else {}
        with torch.no_grad():
            logits: torch.Tensor = self.model(ids, **{self._keyword: cache}, use_cache=True, **kwargs).logits
        return logits

    def _loss(self, scores: torch.Tensor) -> torch.Tensor:
        targets = self.ids[0, self.prefix + 1 :].to(scores.device)
        return -scores.gather(1, targets[:, None])[:, 0]

    def _calls_on_the_cache(self, calls: dict[int, AttentionCall]) -> dict[int, AttentionCall]:
        """Without layers that attend to something else than what they cache (MLA)."""
        sides = {i: (k, v) for i, k, v in zip(self.layers, self.keys, self.values, strict=True)}
        return {
            i: call
            for i, call in calls.items()
            if i in sides
            and all(own.shape[1::2] == x.shape[1::2] for own, x in zip(sides[i], (call.keys, call.values), strict=True))
        }

    def _check_finite(self) -> None:
        for i, k, v in zip(self.layers, self.keys, self.values, strict=True):
            if not bool(k.isfinite().all() and v.isfinite().all()):
                raise NonFiniteError(f"NaN or Inf in K or V of layer {i}: load the model in another dtype")


def layer_errors(window: Window, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> list[LayerError]:
    """Errors of replaced K and V, each [1, H, P, D], one for each of the window's layers."""
    errors = []
    for i, k0, v0, k, v in zip(window.layers, window.keys, window.values, keys, values, strict=True):
        centred = k0.float() - k0.float().mean(dim=2, keepdim=True)
        attention = float("nan")
        if i in window.calls:
            call = window.calls[i]
            with torch.no_grad():
                attention = _ratio(call.again(k, v).float() - call.output.float(), call.output.float()) ** 0.5
        key, value = _ratio(k.float() - k0.float(), centred), _ratio(v.float() - v0.float(), v0.float())
        errors.append(LayerError(i, key, value, attention))
    return errors


def _ratio(error: torch.Tensor, of: torch.Tensor) -> float:
    """Energy of the one over energy of the other."""
    energy = of.square().sum().item()
    return error.square().sum().item() / energy if energy else 0.0


def _filled(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    return keys is not None and keys.numel() > 0


def _cache_keyword(model: Any) -> str:
    keyword = model_keyword(model)
    if keyword not in inspect.signature(type(model).forward).parameters:
        raise _no_cache(model)
    return keyword


def _empty_cache(model: Any) -> Any:
    return importlib.import_module("transformers").DynamicCache(config=model.config)


def _no_cache(model: Any) -> CacheTypeError:
    return CacheTypeError(
        f"{type(model).__name__} keeps no K and V in layers of full attention: TQ-Offload has nothing to pack here; "
        "serve the model without it"
    )
