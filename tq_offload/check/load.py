"""A model and its tokenizer from a folder or the Hugging Face Hub; every failure is a `CheckError`."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tq_offload.errors import CheckError

__all__ = ["DTYPES", "load", "quiet"]

DTYPES = ("auto", "float32", "bfloat16", "float16")


def load(name: str, *, dtype: str = "auto", device: str | None = None, four_bit: bool = False) -> tuple[Any, Any]:
    """The model in eval mode, and its tokenizer.

    Args:
        name: A folder, or the name of a model on the Hub.
        dtype: One of `DTYPES`; "auto": float32 on a CPU, the checkpoint's own elsewhere.
        device: A torch device; None: CUDA where there is a device, else the CPU.
        four_bit: Weights in 4 bits by bitsandbytes.

    Raises:
        CheckError: Transformers or bitsandbytes is not installed, or the model cannot be loaded.
    """
    if find_spec("transformers") is None:
        raise CheckError("transformers is not installed: pip install 'tq-offload[check]'")
    if dtype not in DTYPES:
        raise CheckError(f"--dtype {dtype} is not understood; allowed: {', '.join(DTYPES)}")
    place = _device(device)
    if dtype == "auto" and place.type == "cpu":
        dtype = "bfloat16" if four_bit else "float32"
    if Path(name).is_file() or (name.startswith((".", "/", "~")) and not Path(name).is_dir()):
        raise CheckError(f"{name} is no folder: give the folder of a model, or its name on the Hub")
    kwargs: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if four_bit:
        kwargs |= _four_bit(str(place))
    transformers = importlib.import_module("transformers")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model, found = transformers.AutoModelForCausalLM.from_pretrained(name, output_loading_info=True, **kwargs)
    except Exception as error:  # OSError, ValueError, KeyError, ImportError and what the formats of weights raise
        raise CheckError(
            f"{name} cannot be loaded ({_line(error)}): give a folder with a causal language model and its tokenizer, "
            "or its name on the Hub"
        ) from error
    if found["missing_keys"] or found["mismatched_keys"]:
        raise CheckError(
            f"{name}: the checkpoint has no weights for {_some(found)}, which would be random: give one "
            "that is complete and fits its config.json"
        )
    return (model if four_bit else model.to(place)).eval(), tokenizer


def _device(name: str | None) -> torch.device:
    """A device that tensors can be on. Raises CheckError."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
        torch.zeros(1, device=place).cpu()
    except Exception as error:  # its kind depends on the device and on the build of torch
        raise CheckError(
            f"--device {name} cannot be used ({_line(error)}): give cpu, or a GPU that torch sees"
        ) from error
    return place


def _some(found: Any) -> str:
    names = [*found["missing_keys"], *(key if isinstance(key, str) else key[0] for key in found["mismatched_keys"])]
    return ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def quiet() -> None:
    """No progress bars and no warnings of transformers in this process: for the command line, not for a library."""
    if find_spec("transformers") is not None:
        logging = importlib.import_module("transformers.utils.logging")
        logging.disable_progress_bar()
        logging.set_verbosity_error()


def _four_bit(device: str) -> dict[str, Any]:
    if find_spec("bitsandbytes") is None:
        raise CheckError("--load-4bit needs bitsandbytes, which is not installed: pip install bitsandbytes accelerate")
    transformers = importlib.import_module("transformers")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": config, "device_map": {"": device}}


def _line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")
