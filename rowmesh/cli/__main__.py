"""The entry point: runs a command and turns what goes wrong into one message and an exit status."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import cyclopts

import rowmesh
from rowmesh._support.faults import reach
from rowmesh._support.files.advice import described
from rowmesh._support.files.places import local_path
from rowmesh._support.files.printable import PrintableFormatter, printable, say
from rowmesh._support.files.secrets import masked
from rowmesh.cli.doctor import doctor
from rowmesh.cli.env import env
from rowmesh.cli.evaluate import evaluate
from rowmesh.cli.export import export
from rowmesh.cli.launcher import end_with_launcher
from rowmesh.cli.plan import plan
from rowmesh.cli.predict import predict
from rowmesh.cli.recommend import recommend
from rowmesh.cli.report import report
from rowmesh.cli.streams import lasting_streams, lost
from rowmesh.cli.train import train, with_resume
from rowmesh.errors import RowmeshError, Terminated

FAILED, INTERRUPTED = 2, 130
MIN_COLUMNS = 20
WAIT_POLICY = "OMP_WAIT_POLICY"
_OTHERS = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_is_leaving = False

if TYPE_CHECKING:
    from rich.console import Console

app = cyclopts.App(
    name="rowmesh",
    help=rowmesh.__doc__,
    version=f"rowmesh {rowmesh.__version__}",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,
)
app.command("rowmesh.cli.data:app", name="data", help="Make and prepare data sets.")
app.command("rowmesh.cli.checkpoint:app", name="checkpoint", help="Look at the checkpoints of a run.")
app.command(plan)
app.command(train)
app.command(evaluate)
app.command(predict)
app.command(recommend)
app.command(report)
app.command(export)
app.command(env)
app.command(doctor)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line.

    Exit status 2 where the command line is wrong or rowmesh refuses or fails, 75 where a signal ended a run that can be
    resumed, 129 where the terminal was closed, 130 after Ctrl-C, 143 after SIGTERM; errors go to standard error, under
    torchrun with the rank in front. A rank ends when torchrun is gone. Threads of OpenMP sleep while they wait, unless
    the environment says otherwise.
    """
    global _is_leaving
    _is_leaving = False
    wait_passively()
    lasting_streams()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    before = {number: signal.getsignal(number) for number in _endings()}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number == signal.SIGTERM:  # hang-ups are ignored under nohup
            signal.signal(number, _terminate)
    end_with_launcher(_complain)
    hook, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        reach("cli.command")
        words = with_resume(sys.argv[1:] if arguments is None else arguments)
        console = _wide_enough()
        _, bound, _ = app.parse_args(words, exit_on_error=False, console=console)
        for path in _paths(bound.arguments.items()):
            local_path(_as_given(path, words), "the path")
        app(words, exit_on_error=False, result_action="return_value", console=console)
        if problem := lost():
            _complain(f"{problem}; what the command was to do is done")
            sys.exit(FAILED)
        sys.exit(0)
    except cyclopts.CycloptsError:  # cyclopts has printed it
        sys.exit(FAILED)
    except RowmeshError as error:
        _complain(str(error))
        sys.exit(Terminated().code if isinstance(error.__cause__, Terminated) else FAILED)
    except Terminated as stop:
        if (error := _failure_before(stop)) is not None:
            _complain(str(error))
        raise
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            say("rowmesh: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:  # a full disk, a folder without permission
        _complain(described(error))
        sys.exit(FAILED)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        _complain(
            f"out of memory: {str(error).rpartition('Allocator: ')[2] or 'Python had no room'}; use smaller tables "
            "(tables.dim, --min-count of the data), layers or batches, or more hosts"
        )
        sys.exit(FAILED)
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():  # there is nothing more to clean up
            signal.signal(number, handler)


def _paths(values: Iterable[Any]) -> Iterator[Path]:
    """The paths among the arguments of a command."""
    for value in values:
        if isinstance(value, Path):
            yield value
        elif isinstance(value, list | tuple):
            yield from _paths(value)


def _as_given(path: Path, words: Iterable[str]) -> str:
    """The words that a path was made of, which makes a single slash of `//`."""
    given = (word.partition("=")[2] if word.startswith("-") and "=" in word else word for word in words)
    return next((word for word in given if Path(word) == path), str(path))


def _interrupt_again(ignored: Any) -> None:
    """Delivers a signal once more that came while an object was being freed, where Python drops what is raised."""
    global _is_leaving
    number = None
    if isinstance(ignored.exc_value, Terminated):
        number = int(ignored.exc_value.code or 0) - 128
    elif ignored.exc_type is KeyboardInterrupt:
        number = signal.SIGINT
    if number is None:
        sys.__unraisablehook__(ignored)
    else:
        _is_leaving = False
        threading.Timer(0.01, _deliver, [number]).start()


def _wide_enough() -> Console | None:
    """A console of `MIN_COLUMNS` where the terminal has fewer: cyclopts would break option names there for ever."""
    if shutil.get_terminal_size().columns >= MIN_COLUMNS:
        return None
    from rich.console import Console

    return Console(width=MIN_COLUMNS)


def _endings() -> list[signal.Signals]:
    """The signals that end a command; Windows has SIGTERM alone."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


def _deliver(number: int) -> None:
    """Sends a signal to the main thread, wherever it waits; on Windows only the process can be named."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        signal.raise_signal(number)


def _terminate(signum: int, frame: FrameType | None) -> None:
    """Leaves through every `finally`, so that a run killed by torchrun cleans up; once, as shells repeat signals."""
    global _is_leaving
    if not _is_leaving:
        _is_leaving = True
        raise Terminated(signum)


def _failure_before(stop: BaseException) -> RowmeshError | None:
    """The error of a rank that torchrun stopped, because another rank had failed, while it was failing itself."""
    error = stop.__context__
    while error is not None and not isinstance(error, RowmeshError):
        error = error.__context__
    return error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python or, in its own way, torch had no memory left."""
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _complain(message: str) -> None:
    rank = os.environ.get("RANK")
    speaker = "rowmesh" if rank is None else f"rowmesh (rank {rank})"
    text = printable(masked(message.removeprefix(f"rank {rank}: ")), lines=True)
    print(f"{speaker}: error: {text}", file=sys.stderr, flush=True)  # noqa: T201 - lines of its own


def wait_passively() -> None:
    """Has threads of OpenMP sleep between two operations, where the environment does not say how they wait.

    They read it when torch is imported, and spin by default: on a machine that has something else to do, other programs
    and threads of the same rank wait for the cores on which nothing is computed.
    """
    if not any(name in os.environ for name in _OTHERS):
        os.environ.setdefault(WAIT_POLICY, "PASSIVE")


if __name__ == "__main__":
    main()
