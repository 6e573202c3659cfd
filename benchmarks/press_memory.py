"""Memory of a cache in a process of its own: what stays, and the peaks of prefill and of decoding.

usage: python -m benchmarks.press_memory [CASE ...] [--tokens 4096]     prints one line of JSON a case
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["CASES", "LAYER_BYTES", "LiveBytes", "measure", "run_cases"]

LAYERS, KV_HEADS, HEAD_DIM, DECODED, WARM_UP = 16, 4, 128, 16, 256
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
        self._lock = threading.Lock()  # a sample from before `restart` must not be noted after it
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
        with self._lock:
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
            with self._lock:
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
    model: Any, ids: torch.Tensor, cache: Any, press: Any, meters: Mapping[str, Any], decoded: int = DECODED
) -> dict[str, Any]:
    """Prefill `ids` [1, T] and decode.

    Returns:
        `resident` after prefill and `resident_after` decoding, in bytes; and for every meter by its name the peaks and
        what is held in the end, in bytes above what it counted before.
    """
    from tq_offload.kv_cache import resident_bytes

    def restart() -> dict[str, int]:
        for meter in meters.values():
            meter.restart()
        return {name: meter.now for name, meter in meters.items()}

    def peaks() -> dict[str, int]:
        return {name: meter.peak - before[name] for name, meter in meters.items()}

    before = restart()
    with press(model) if press is not None else contextlib.nullcontext():
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    cache.get_seq_length()
    prefill_peaks = peaks()
    gc.collect()
    resident = resident_bytes(cache)
    restart()
    for position in range(ids.shape[1], ids.shape[1] + decoded):
        where = torch.tensor([[position]])
        token = model(token, past_key_values=cache, position_ids=where).logits[:, -1].argmax(-1, keepdim=True)
    cache.get_seq_length()
    decode_peaks = peaks()
    held = restart()
    by_meter = {
        name: {
            "held": held[name] - before[name],
            "prefill_peak": prefill_peaks[name],
            "decode_peak": decode_peaks[name],
        }
        for name in meters
    }
    return {"resident": resident, "resident_after": resident_bytes(cache), **by_meter}


def run_cases(tokens: int, cases: Sequence[str] = CASES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure cases one after the other, each in a process of its own; each is given as soon as it is known.

    Raises:
        subprocess.CalledProcessError: A case failed; its output is on the terminal.
    """
    # Fixed thresholds: glibc would otherwise keep ever larger blocks, and the kernel's count would say little.
    # One thread: two that wait for each other after every operation took four times the CPU time on shared cores.
    env = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "131072",
        "MALLOC_TRIM_THRESHOLD_": "131072",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-m", "benchmarks.press_memory", *cases, "--tokens", str(tokens)]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                yield result["case"], result
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)


def _measured(case: str, make_cache: Callable[[Any], Any], press: Any, model: Any, ids: torch.Tensor) -> dict[str, Any]:
    """One case: by the kernel's count and by the tensors that are alive, in one run."""
    with _AnonymousBytes() as process, LiveBytes([*model.parameters(), *model.buffers(), ids]) as live:
        result = measure(model, ids, make_cache(model.config), press, {"live": live, "process": process})
    return {**result, **result.pop("live"), "fp_layer": LAYER_BYTES * ids.shape[1], "case": case}


def main() -> int:
    """Compile and warm up once, then fork a process for every case; 1 if one of them fails."""
    from benchmarks.press_caches import tiny_llama

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    made, chosen = _cases(), options.cases or CASES
    if unknown := set(chosen) - set(made):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    torch.set_num_threads(1)  # no threads that a forked process would miss
    model = tiny_llama(LAYERS, KV_HEADS, HEAD_DIM)
    ids = torch.randint(0, 128, (1, options.tokens))
    for case in chosen:
        make_cache, make_press = made[case]
        measure(model, ids[:, :WARM_UP], make_cache(model.config), make_press(), {}, decoded=1)
    for case in chosen:
        child = os.fork()
        if not child:
            make_cache, make_press = made[case]
            print(json.dumps(_measured(case, make_cache, make_press(), model, ids)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
