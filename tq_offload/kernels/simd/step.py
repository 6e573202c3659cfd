"""How the steps on rows in memory are written: a Python function that emits LLVM IR, as a numba intrinsic."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from tq_offload.kernels.simd.vector import Lanes

__all__ = ["ADDRESS", "FACTOR", "step"]

ADDRESS, FACTOR = types.int64, types.float32


def step(*arguments: Any, result: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic (config, *values) of a function (v: `Lanes`, settings: `KernelConfig`, *values).

    Args:
        *arguments: numba types of the values.
        result: numba type of what the function returns; `types.void`: nothing.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typing(_context: Any, config: Any, *_values: Any) -> Any:
            def codegen(context: Any, builder: Any, _sig: Any, args: Any) -> Any:
                v = Lanes(context, builder, config.config.permute, config.config.lanes)
                value = emit(v, config.config, *args[1:])
                return context.get_dummy_value() if result is types.void else value

            return result(config, *arguments), codegen

        # numba passes what a function takes by its names on: one for the context, one for the config, and the values'.
        typing.__name__, typing.__doc__ = emit.__name__, emit.__doc__
        typing.__signature__ = inspect.signature(emit)  # type: ignore[attr-defined]
        return intrinsic(typing)

    return decorate
