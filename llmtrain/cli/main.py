"""The command line.

Builds the app, runs one command, and is the only place that turns errors into exit codes.
"""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, NoReturn

import typer

from llmtrain import __version__
from llmtrain.cli import console
from llmtrain.errors import ExitStatus, LlmtrainError, Problem

COMMANDS = (
    "plan",
    "simulate",
    "launch",
    "resume",
    "status",
    "logs",
    "stop",
    "report",
    "tensorboard",
    "wandb",
    "metrics",
    "dashboards",
    "doctor",
    "data",
    "checkpoint",
    "recipes",
    "profiles",
)
"""Modules of `llmtrain.cli`, in the order of `--help`; each has `register(app)`."""

_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
"""typer's base of all usage errors; it has no public name of its own."""


def main() -> NoReturn:
    """Entry point of the `llmtrain` command."""
    # Nearly everything made while a command loads lives to its end: looking for garbage so soon finds none.
    gc.set_threshold(100_000)
    code = run(sys.argv[1:])
    # Nor does looking through all of it once more at the end, which takes a tenth of a short command's time.
    gc.freeze()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code, and raises nothing."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Callable[..., None] | None = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        code = _invoke(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        console.quiet_standard_output()
        return 128 + signal.SIGPIPE
    return code


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The app with these commands; nothing heavy is imported."""
    app = typer.Typer(
        name="llmtrain",
        help="Plan, launch, train, watch and resume large language model training runs.",
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    app.callback(invoke_without_command=True)(_root)
    for name in commands:
        importlib.import_module(f"llmtrain.cli.{name}").register(app)
    return app


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    if version:
        console.emit(f"llmtrain {__version__}")
        raise typer.Exit(ExitStatus.DONE)
    if context.invoked_subcommand is None:
        console.say(context.get_help())
        raise typer.Exit(ExitStatus.USAGE)


def _invoke(arguments: Sequence[str]) -> int:
    """Exit code of a command, with what went wrong already said."""
    stdout = sys.stdout
    # Fifteen commands cost 30 ms to build, and all but one would be for nothing.
    commands = arguments[:1] if arguments and arguments[0] in COMMANDS else COMMANDS
    try:
        result = make_app(commands)(args=list(arguments), prog_name="llmtrain", standalone_mode=False)
        return int(result) if isinstance(result, int) else ExitStatus.DONE
    except LlmtrainError as error:
        return _report(error.problems, error.exit_status, arguments)
    except _USAGE_ERROR as error:
        if error.format_message().startswith("Usage: "):  # a command group without a command: its help
            console.say(error.format_message())
            return ExitStatus.USAGE
        return _report([usage_problem(error)], ExitStatus.USAGE, arguments)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 128 + signal.SIGINT
    except SystemExit as leave:
        if sys.stdout is not stdout:  # typer met a closed pipe and put a stand-in there
            sys.stdout = stdout
            raise BrokenPipeError from None
        return leave.code if isinstance(leave.code, int) else ExitStatus.FAILED
    except BrokenPipeError:
        raise
    except Exception as error:
        from llmtrain.cli.crash import crash_problem

        return _report([crash_problem(error, arguments)], ExitStatus.FAILED, arguments)


def _report(problems: Sequence[Problem], status: ExitStatus, arguments: Sequence[str]) -> int:
    """Say what is wrong; with `--json` also as the object that a program waits for."""
    console.say_problems(problems)
    if "--json" in arguments:
        console.emit_json({"problems": console.problem_documents(problems)})
    return status


def usage_problem(error: Any) -> Problem:
    """A usage error of typer in the style of all our errors."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "llmtrain"
    look = f"see `{command} --help`"
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):
        near = [f"--{name}" for name in _near(error.option_name.lstrip("-"), _option_names(context), 0.6)]
        suggestion = f"did you mean `{near[0]}`? " if near else ""
        return Problem("", f"{command} has no option `{error.option_name}`", f"{suggestion}{look}")
    message = _plain_words(error.format_message().strip().rstrip("."))
    if message.startswith("No such command"):
        return _unknown_command(message, command, context)
    if message.startswith("Got unexpected extra argument"):
        extra = message.partition("(")[2].rpartition("(")[2].rstrip(")")
        return Problem("", f"{command} takes no further argument `{extra}`", look)
    return Problem("", f"{command}: {message[:1].lower()}{message[1:]}", look)


def _plain_words(message: str) -> str:
    """typer's words for a wrong number, as people say them."""
    for theirs in ("a valid integer range", "a valid int range", "a valid integer", "a valid int"):
        message = message.replace(theirs, "a whole number")
    return message.replace("a valid float", "a number").replace(" is not in the range x>=", " is not >= ")


def _unknown_command(message: str, command: str, context: Any) -> Problem:
    name = message.split("'")[1] if message.count("'") >= 2 else ""
    known = list(getattr(context.command, "commands", {})) if context is not None else []
    near = _near(name, known)
    suggestion = f"did you mean `{near[0]}`? " if near else ""
    return Problem("", f"{command} has no command `{name}`", f"{suggestion}known: {', '.join(known)}")


def _near(name: str, known: Sequence[str], cutoff: float = 0.5) -> list[str]:
    return get_close_matches(name, known, n=1, cutoff=cutoff)


def _option_names(context: Any) -> list[str]:
    parameters = context.command.params if context is not None else []
    return ["help", *(option[2:] for entry in parameters for option in entry.opts if option.startswith("--"))]
