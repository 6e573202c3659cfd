"""The commands of `tq-offload`. Importing this module imports typer and rich; transformers is imported by `check`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tq_offload.check.report import Bounds, Report
from tq_offload.check.sample import Sample
from tq_offload.codec import TurboQuantCodec
from tq_offload.errors import CheckError
from tq_offload.spec import PRESETS, CodecSpec

__all__ = ["app"]

app = typer.Typer(
    help="TQ-Offload: check a model before deployment, list presets, look into a frame.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=200)


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A folder, or the name of a model on the Hugging Face Hub.")],
    text: Annotated[Path | None, typer.Option(help="A text file (UTF-8); by default a text of the package.")] = None,
    preset: Annotated[list[str] | None, typer.Option(help="Presets to check; all by default.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to score.")] = Sample.tokens,
    prefix: Annotated[int, typer.Option(help="Stored tokens before the scored ones.")] = Sample.prefix,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk, as LMCache is set.")] = 256,
    max_kl: Annotated[float, typer.Option(help="Bound of the KL divergence, nats a token.")] = Bounds.kl,
    max_ppl: Annotated[float, typer.Option(help="Bound of the change of the perplexity, percent.")] = 100
    * Bounds.perplexity,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the whole report to this file.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Show the table of layers.")] = False,
    load_4bit: Annotated[bool, typer.Option("--load-4bit", help="Load the weights in 4 bits (bitsandbytes).")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device; CUDA where there is one by default.")] = None,
) -> None:
    """Score presets on a model, and recommend the cheapest one within the bounds. Exit code 1: none fits."""
    bounds, sample = Bounds(max_kl, max_ppl / 100), Sample(prefix, tokens)
    presets = {name: CodecSpec.preset(name, setting="--preset") for name in preset or PRESETS}
    words = None if text is None else _read_text(text)
    _check_writable(json_file)
    report = _run(model, words, presets, bounds, sample, chunk_tokens, dtype, device, load_4bit)
    render = importlib.import_module("tq_offload.check.render")
    console = _console()
    console.print(render.report_view(report), highlight=False)
    if layers:
        console.print(render.layer_table(report))
    if json_file is not None:
        _write(json_file, json.dumps(report.to_dict(), indent=2) + "\n")
    if report.recommended is None:
        raise typer.Exit(1)


def _run(
    model: str, text: str | None, presets: dict[str, CodecSpec], bounds: Bounds, sample: Sample, chunk_tokens: int,
    dtype: str, device: str | None, load_4bit: bool,
) -> Report:  # fmt: skip
    from tq_offload.check.guard import check_model
    from tq_offload.check.load import load, quiet

    quiet()
    with Console(stderr=True).status("loading the model") as status:
        net, tokenizer = load(model, dtype=dtype, device=device, four_bit=load_4bit)
        return check_model(
            net, tokenizer, text, presets, bounds=bounds, sample=sample, chunk_tokens=chunk_tokens, name=model,
            progress=status.update,
        )  # fmt: skip


@app.command()
def presets() -> None:
    """List the presets and what they store at head_dim 64 and 128."""
    from tq_offload.check.render import preset_table

    _console().print(preset_table(PRESETS), highlight=False)


@app.command()
def inspect(file: Annotated[Path, typer.Argument(help="A file that holds a frame.")]) -> None:
    """Check a frame and show its header. Exit code 1: not a sound frame."""
    from tq_offload.check.render import header_table

    if file.exists() and not file.is_file():
        raise CheckError(f"{file} is no regular file: give the file of a frame")
    try:
        frame = file.read_bytes()
    except OSError as error:
        raise CheckError(f"{file} cannot be read ({error.strerror}): give the file of a frame") from error
    _console().print(header_table(TurboQuantCodec.inspect(frame)), highlight=False)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise CheckError(f"--text {path} cannot be read ({why}): give a text file in UTF-8") from error


def _check_writable(path: Path | None) -> None:
    """Before the work, not after it."""
    if path is not None and not path.parent.is_dir():
        raise CheckError(f"--json {path}: there is no folder {path.parent}; make it first")
    if path is not None and path.is_dir():
        raise CheckError(f"--json {path} is a folder: give a file")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckError(f"--json {path} cannot be written ({error.strerror}): give another file") from error
