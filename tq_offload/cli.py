"""`tq-offload`: the command line. Typer, rich and transformers are imported only where a command needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tq_offload.errors import FrameError, TQOffloadError

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> None:
    """Run a command and exit. What this package raises is one line on stderr.

    Args:
        args: Arguments without the program's name; None: those of the process.

    Raises:
        SystemExit: 0: done. 1: no preset fits, or a file is not a sound frame. 2: anything that was asked wrongly.
    """
    try:
        from tq_offload.check.commands import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        _fail(f"{error.name} is not installed: pip install 'tq-offload[check]'", 2)
    try:
        app(args=None if args is None else list(args), prog_name="tq-offload")
    except FrameError as error:
        _fail(f"not a sound frame ({error.reason}): {error}; an engine counts it as a miss and stores it anew", 1)
    except TQOffloadError as error:
        _fail(str(error), 2)


def _fail(message: str, code: int) -> None:
    """End the process with a line on stderr."""
    line = " ".join(message.split())
    sys.stderr.write(f"tq-offload: {line}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
