"""pytest plugin for kvpress's own tests: puts our classes where a run wants them. `-p` loads it, TQ_UPSTREAM tells it.

Every test is seeded by its name, and reports how often something was packed meanwhile (`packed` in the XML report): a
run that packs nothing proves nothing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

RUN: dict[str, Any] = json.loads(os.environ["TQ_UPSTREAM"])  # {"mode": ..., "settings": {...}}
packed = 0


def count_packing() -> None:
    """Count calls of the one function that packs."""
    from tq_offload.kv_cache.packed import PackedTokens

    encode = PackedTokens.encode.__func__  # type: ignore[attr-defined]

    def counted(cls: type, *args: Any, **kwargs: Any) -> Any:
        global packed
        packed += 1
        return encode(cls, *args, **kwargs)

    PackedTokens.encode = classmethod(counted)  # type: ignore[method-assign, assignment]


def add_our_press() -> None:
    """`default_presses` with entries of ours."""
    from kvpress import ExpectedAttentionPress, KnormPress, SnapKVPress, ThinKPress
    from tests.default_presses import default_presses  # type: ignore[import-not-found]

    from tq_offload.press import TurboQuantPress

    plain = {"sink_tokens": 0, "window": 0}
    kwargs: list[dict[str, Any]] = [
        {}, {"bits": 3, **plain}, {"bits": 4, **plain}, {"key_bits": 8, "value_bits": 4, "window": 16},
        {"press": SnapKVPress(0.5, window_size=2), **plain}, {"press": KnormPress(0.8)},
        {"press": ExpectedAttentionPress(0.2), **plain}, {"press": ThinKPress(0.2, window_size=2), **plain},
    ]  # fmt: skip
    default_presses.extend({"cls": TurboQuantPress, "kwargs": [one]} for one in kwargs)


def wrap_default_presses() -> None:
    """Every entry of `default_presses` inside our press."""
    from tests.default_presses import default_presses

    from tq_offload.press import TurboQuantPress

    def wrapped(cls: type) -> Callable[..., Any]:
        def make(**kwargs: Any) -> Any:
            return TurboQuantPress(press=cls(**kwargs), **RUN["settings"])

        make.__name__ = f"TurboQuant{cls.__name__}"
        return make

    for entry in default_presses:
        entry["cls"] = wrapped(entry["cls"])


def wrap_every_press() -> None:
    """Every `with press(model):` of the whole suite becomes `with TurboQuantPress(press=press)(model):`."""
    import kvpress
    from kvpress.presses.base_press import BasePress

    from tq_offload.press import TurboQuantPress

    inside = False

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def wrapped(self: Any, model: Any) -> Iterator[None]:
            nonlocal inside
            if inside:  # ours has called it, or a press calls the press that it holds
                with call(self, model):
                    yield
                return
            inside = True
            try:
                with TurboQuantPress(press=self, **RUN["settings"])(model):
                    yield
            finally:
                inside = False

        return wrapped

    for cls in {BasePress, *(x for x in vars(kvpress).values() if isinstance(x, type) and issubclass(x, BasePress))}:
        if "__call__" in vars(cls):
            cls.__call__ = wrap(vars(cls)["__call__"])


def pack_every_cache() -> None:
    """Every `DynamicCache()` that kvpress, its tests and the model make is packed."""
    import kvpress.pipeline
    import transformers
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama as llama

    from tq_offload.kv_cache import TurboQuantCache

    class Packed(TurboQuantCache):
        def __init__(self, *, config: Any = None) -> None:
            super().__init__(config=config, **RUN["settings"])

    for module in (transformers, kvpress.pipeline, transformers.generation.utils, llama):
        assert issubclass(Packed, module.DynamicCache), module
        module.DynamicCache = Packed


MODES: dict[str, tuple[Callable[[], None], ...]] = {
    "baseline": (),
    "our-press": (count_packing, add_our_press),
    "every-cache": (count_packing, pack_every_cache),
    "default-presses": (count_packing, wrap_default_presses),
    "every-press": (count_packing, wrap_every_press),
}


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    torch.set_num_threads(1)
    for step in MODES[RUN["mode"]]:
        step()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Seeds, and the count of this test."""
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """How often something was packed while the test ran."""
    before = packed
    try:
        return (yield)
    finally:
        item.user_properties.append(("packed", packed - before))
