"""`tq-offload`: output, exit codes, and one line instead of a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packed_support import small_llama, text, word_tokenizer
from support import one_torch_thread as one_torch_thread

from tq_offload.cli import main
from tq_offload.spec import PRESETS

GOLDEN = Path(__file__).parent.parent / "golden"
SMALL = ("--prefix", "128", "--tokens", "64", "--chunk-tokens", "64")
LOOSE = ("--max-kl", "1000", "--max-ppl", "1e9")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(text(300))
    return path


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in args])
    return int(end.value.code or 0)


def failure(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("tq-offload: ")
    return str(line)


def test_check(folder: Path, words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    names = list(PRESETS)[:2]
    chosen = [part for name in names for part in ("--preset", name)]
    assert run("check", folder, "--text", words, *SMALL, *LOOSE, *chosen, "--json", out, "--layers") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert "3 layers of full attention, 2 KV heads of 64" in shown
    report = json.loads(out.read_text())
    assert f"Recommended: {report['recommended']}" in shown
    assert f"TQ_OFFLOAD_PRESET={report['recommended']}" in shown
    assert "131,072" in shown
    assert "attention error" in shown
    assert {r["name"] for r in report["presets"]} == set(names)
    assert report["model"] == str(folder)


def test_none_fits(folder: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", folder, "--text", words, *SMALL, "--max-kl", "1e-12", "--preset", "turboquant") == 1
    shown = capsys.readouterr().out
    assert "No preset fits (KL up to 1e-12" in shown
    assert "Best: turboquant, KL" in shown


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--preset", "nope"), f"--preset='nope' is not understood; allowed: {', '.join(PRESETS)}"),
        (("--tokens", "5000"), "give a longer text with --text"),
        (("--tokens", "0"), "--tokens 0: at least 1 token"),
        (("--chunk-tokens", "0"), "--chunk-tokens 0: at least 1 token"),
        (("--text", "/no/such"), "--text /no/such cannot be read (No such file or directory)"),
        (("--text", str(GOLDEN / "default_packed_128.tqkv")), "not UTF-8"),
        (("--json", "/no/such/report.json"), "there is no folder /no/such"),
        (("--max-kl", "0"), "a bound is a number above 0"),
        (("--dtype", "int3"), "allowed: auto, float32"),
    ],
)
def test_what_is_asked_wrongly(
    folder: Path, words: Path, args: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", folder, "--text", words, *SMALL, *args) == 2
    assert line in failure(capsys)


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", tmp_path) == 2
    assert "give a folder with a causal language model" in failure(capsys)


def test_a_model_without_a_kv_cache(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    assert run("check", tmp_path, "--text", words, *SMALL) == 2
    assert "MambaForCausalLM keeps no K and V in layers of full attention" in failure(capsys)


def test_a_model_with_nan(tmp_path: Path, words: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small_llama()
    model.model.layers[1].self_attn.k_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    assert run("check", tmp_path, "--text", words, *SMALL) == 2
    assert "NaN or Inf in K or V of layer 1: load the model in another dtype" in failure(capsys)


@pytest.mark.parametrize("device", ["meta", "gpu", "cpu:nine"])
def test_a_device_that_cannot_be_used(folder: Path, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("check", folder, "--device", device) == 2
    assert f"--device {device} cannot be used" in failure(capsys)


def test_a_checkpoint_that_lacks_weights(
    tmp_path: Path, folder: Path, words: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    changed = {**json.loads(config.read_text()), "num_hidden_layers": 4}
    changed.pop("layer_types", None)
    config.write_text(json.dumps(changed))
    assert run("check", tmp_path / "model", "--text", words, *SMALL) == 2
    assert "no weights for model.layers.3." in failure(capsys)


def test_models_that_are_no_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    for name in ("nothing", "file"):
        assert run("check", tmp_path / name) == 2
        assert "is no folder" in failure(capsys)


def test_a_report_that_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", "any/model", "--json", tmp_path) == 2
    assert "is a folder: give a file" in failure(capsys)


def test_bitsandbytes_is_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tq_offload.check import load

    monkeypatch.setattr(load, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    assert run("check", folder, "--load-4bit") == 2
    assert "pip install bitsandbytes" in failure(capsys)


def test_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("presets") == 0
    shown = capsys.readouterr().out
    assert all(f"{name} " in shown for name in PRESETS)
    assert "4.31" in shown
    assert "4.19" in shown


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.tqkv")), ids=lambda path: path.stem)
def test_inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", path) == 0
    shown = capsys.readouterr().out
    assert f"{path.stat().st_size:,} for" in shown
    assert "checksum" in shown


def test_inspect_a_damaged_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = bytearray((GOLDEN / "default_kv_first_64.tqkv").read_bytes())
    frame[-100] ^= 1
    (tmp_path / "frame").write_bytes(frame)
    assert run("inspect", tmp_path / "frame") == 1
    assert "not a sound frame (checksum)" in failure(capsys)
    (tmp_path / "frame").write_bytes(b"")
    assert run("inspect", tmp_path / "frame") == 1
    assert "not a sound frame (length)" in failure(capsys)


def test_inspect_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", tmp_path / "nothing") == 2
    assert "No such file" in failure(capsys)
    for path in (tmp_path, Path("/dev/zero")):
        assert run("inspect", path) == 2
        assert "no regular file" in failure(capsys)


def test_without_typer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "tq_offload.check.commands", raising=False)
    assert run("presets") == 2
    assert "typer is not installed: pip install 'tq-offload[check]'" in failure(capsys)


def test_importing_is_light() -> None:
    probe = (
        "import sys, tq_offload.cli, tq_offload.check; "
        "print([m for m in ('typer', 'rich', 'torch', 'transformers', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_presets_loads_neither_transformers_nor_kernels() -> None:
    probe = (
        "import sys\nfrom tq_offload.cli import main\n"
        "try: main(['presets'])\nexcept SystemExit: pass\n"
        "sys.stderr.write(str([m for m in ('transformers', 'numba') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
