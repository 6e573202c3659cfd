"""Memory of a cache in a process of its own: what stays, and the peaks of prefill and of decoding.

usage: python -m benchmarks.press_memory CASE [--tokens 4096]     prints one line of JSON
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["CASES", "LAYER_BYTES", "LiveBytes", "measure", "run_case"]

LAYERS, KV_HEADS, HEAD_DIM, DECODED = 16, 4, 128, 16
LAYER_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""Bytes that one token takes in one layer, K and V in bf16."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still alive; `ignored` are known from before."""

    def __init__(self, ignored: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_flatten(out)[0]:
            if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                self._count(item.untyped_storage())
        return out

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._known or not storage.nbytes():
            return
        self._known.add(storage._cdata)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())

    def _freed(self, cdata: int, nbytes: int) -> None:
        self._known.discard(cdata)
        self.now -= nbytes

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now


class _AnonymousBytes:
    """The kernel's view: anonymous memory of the process now, and its highest in samples since `restart`.

    Not the whole resident set: pages of libraries come and go as the kernel likes.
    """

    _INTERVAL_S = 0.002

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _AnonymousBytes:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def restart(self) -> None:
        """Give freed memory back to the kernel (glibc) and forget the peak so far."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        self.peak = self.now

    @property
    def now(self) -> int:
        """Anonymous resident bytes. Linux only."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("this kernel does not tell RssAnon in /proc/self/status")

    def _watch(self) -> None:
        while not self._stop.wait(self._INTERVAL_S):
            self.peak = max(self.peak, self.now)


def _cases() -> dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]]:
    """Name: how to make the cache from a config, and how to make the press (None: none)."""
    from kvpress import SnapKVPress

    from benchmarks.press_caches import NO_EXACT, fp_cache, quanto_cache, turboquant
    from tq_offload.press import TurboQuantPress

    return {
        "fp": (fp_cache, lambda: None),
        "quanto": (quanto_cache, lambda: None),
        "4-bit": (fp_cache, lambda: TurboQuantPress(**NO_EXACT)),
        "4-bit-exact-128": (fp_cache, TurboQuantPress),
        "4-bit-cache": (turboquant(), lambda: None),
        "snapkv-4-bit": (fp_cache, lambda: TurboQuantPress(press=SnapKVPress(0.5), **NO_EXACT)),
        "snapkv-4-bit-exact-128": (fp_cache, lambda: TurboQuantPress(press=SnapKVPress(0.5))),
        "snapkv": (fp_cache, lambda: SnapKVPress(0.5)),
    }


CASES = ("fp", "quanto", "4-bit", "4-bit-exact-128", "4-bit-cache", "snapkv", "snapkv-4-bit", "snapkv-4-bit-exact-128")


@torch.no_grad()
def measure(
    model: Any, ids: torch.Tensor, cache: Any, press: Any, meter: Any, decoded: int = DECODED
) -> dict[str, int]:
    """Prefill `ids` [1, T] and decode; peaks and rests in bytes, counted from what the process held before."""
    from tq_offload.kv_cache import resident_bytes

    meter.restart()
    before = meter.now
    with press(model) if press is not None else contextlib.nullcontext():
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    cache.get_seq_length()
    prefill_peak = meter.peak - before
    gc.collect()
    resident = resident_bytes(cache)
    meter.restart()
    for position in range(ids.shape[1], ids.shape[1] + decoded):
        where = torch.tensor([[position]])
        token = model(token, past_key_values=cache, position_ids=where).logits[:, -1].argmax(-1, keepdim=True)
    cache.get_seq_length()
    peak = meter.peak - before
    gc.collect()
    return {
        "resident": resident,
        "held": meter.now - before,
        "prefill_peak": prefill_peak,
        "decode_peak": peak,
        "resident_after": resident_bytes(cache),
    }


def run_case(case: str, tokens: int) -> dict[str, Any]:
    """Measure a case in a fresh process. Raises subprocess.CalledProcessError with its output on the terminal."""
    # Fixed thresholds: glibc would otherwise keep ever larger blocks, and the kernel's count would say little.
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "MALLOC_ARENA_MAX": "1",
    }
    argv = [sys.executable, "-m", "benchmarks.press_memory", case, "--tokens", str(tokens)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """One case: by the tensors that are alive, then by the kernel's count."""
    from benchmarks.press_caches import tiny_llama

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    make_cache, make_press = _cases()[options.case]
    model = tiny_llama(LAYERS, KV_HEADS, HEAD_DIM)
    ids = torch.randint(0, 128, (1, options.tokens))
    with _AnonymousBytes() as process:
        measure(model, ids, make_cache(model.config), make_press(), process)  # compiles, fills pools
        by_process = measure(model, ids, make_cache(model.config), make_press(), process)
    known = [*model.parameters(), *model.buffers(), ids]
    with LiveBytes(known) as meter:
        result: dict[str, Any] = measure(model, ids, make_cache(model.config), make_press(), meter)
    print(json.dumps({**result, "process": by_process, "fp_layer": LAYER_BYTES * options.tokens, "case": options.case}))


if __name__ == "__main__":
    main()
