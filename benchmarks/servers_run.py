"""How a run that starts servers ends: its logs kept or removed, what is said, and the exit code."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import typer
from rich.console import Console

from benchmarks.process import DeploymentError, stop_on_signals

__all__ = ["BROKEN", "FAILED", "run_and_exit"]

FAILED, BROKEN, INTERRUPTED = 1, 2, 130
Found = TypeVar("Found")


def run_and_exit(
    name: str,
    console: Console,
    run: Callable[[Path], Found],
    conclude: Callable[[Found], tuple[int, bool]],
    *,
    keep: bool,
) -> NoReturn:
    """Run in a new folder for logs, conclude, and exit. The folder stays where asked for, and where servers failed.

    Args:
        name: Part of the folder's name.
        console: Where it is said how the run ended.
        run: Starts servers and measures, given the folder; stopped by SIGTERM and SIGHUP too.
        conclude: Prints what was found; returns the exit code, and whether the logs are of use.
        keep: Keep the logs in any case.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"tq-offload-{name}-"))
    status, keep_logs = BROKEN, keep
    try:
        with stop_on_signals():
            found = run(folder)
        status, useful = conclude(found)
        keep_logs = keep or useful
    except DeploymentError as error:
        keep_logs = True
        console.print(f"\nThe run could not finish: {error}", style="red", markup=False, highlight=False)
    except KeyboardInterrupt:
        status = INTERRUPTED
        console.print("\nInterrupted; all servers were stopped.")
    finally:
        if keep_logs:
            console.print(f"Logs: {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(status)
