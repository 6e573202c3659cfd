"""Attention calls of a transformers model, recorded and run again with other K and V."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

__all__ = ["AttentionCall", "recorded_attention"]


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function over P tokens of a cache and S new ones.

    `query` [1, Hq, S, D], `keys` and `values` [1, H, S, D] of the new tokens, `output` [1, S, Hq, D]; `mask` and
    `kwargs` as the model passed them.
    """

    function: Callable[..., Any]
    module: Any
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: Any
    kwargs: dict[str, Any]
    output: torch.Tensor

    def again(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The output, [1, S, Hq, D], with other K and V [1, H, P, D] of the P tokens in the cache."""
        k = torch.cat([keys.to(self.keys), self.keys], dim=2)
        v = torch.cat([values.to(self.values), self.values], dim=2)
        output: torch.Tensor = self.function(self.module, self.query, k, v, self.mask, **self.kwargs)[0]
        return output


@contextmanager
def recorded_attention(model: Any, prefix: int) -> Iterator[dict[int, AttentionCall]]:
    """Record the attention calls of a model whose cache holds `prefix` tokens, by the index of their layer.

    The function that the model's config selects is wrapped: an entry of `ALL_ATTENTION_FUNCTIONS`, or the
    `eager_attention_forward` of the model's module. A layer whose K does not hold the prefix and the new tokens (a
    sliding window) and a layer that does not use these functions are not in the result.
    """
    calls: dict[int, AttentionCall] = {}
    modules = {m: getattr(m, "config", None) for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    names = {str(getattr(config, "_attn_implementation", "eager")) for config in modules.values()} - {"eager"}
    functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    with ExitStack() as stack:
        for name in sorted(name for name in names if name in functions):
            stack.enter_context(_replaced(functions, name, _recording(functions[name], modules, prefix, calls)))
        for file in {type(m).__module__ for m in modules}:
            eager = getattr(sys.modules[file], "eager_attention_forward", None)
            if eager is not None:
                wrapped = _recording(eager, modules, prefix, calls)
                stack.enter_context(mock.patch.object(sys.modules[file], "eager_attention_forward", wrapped))
        yield calls


@contextmanager
def _replaced(functions: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Another function under a name of transformers' registry, until the block ends."""
    local = vars(functions).get("_local_mapping", {})
    before = local.get(name)
    functions[name] = function
    try:
        yield
    finally:
        if before is None:
            del functions[name]
        else:
            functions[name] = before


def _recording(
    function: Callable[..., Any], modules: dict[Any, Any], prefix: int, calls: dict[int, AttentionCall]
) -> Callable[..., Any]:
    def attend(module: Any, query: Any, keys: Any, values: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(module, query, keys, values, mask, *args, **kwargs)
        if module in modules and not args and keys.shape[2] == prefix + query.shape[2]:
            k, v = keys[:, :, prefix:].clone(), values[:, :, prefix:].clone()
            calls[module.layer_idx] = AttentionCall(function, module, query, k, v, mask, kwargs, result[0])
        return result

    return attend
