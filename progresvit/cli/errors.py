"""Errors that a user can fix: one line, in the options of the running command, and exit code 2.

The package names the argument of a function (``pass overwrite=True``), which is what a Python user types. The command
prints the option of the same name (``pass --overwrite``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from progresvit.io.parse import printable

_ARGUMENT = re.compile(
    r"""
    [\w.]+\([^()]*\)                    # a call in Python stays as it is: Engine(max_pixels=100)
    | --[a-z][\w-]*[ =]\S+              # so does an option: --set optimizer.batch=64
    | ^(?P<subject>[a-z]\w*)(?=\ must\ be\ )
    | (?<![\w./=-])(?P<name>[a-z]\w*(?:\.\w+)*)=(?P<value>
        '[^']*' | "[^"]*" | \([^()]*\) | \[[^][]*\]
        | (?:[^\s,;:.()'"`] | [,:.](?=[^\s,;:.()'"`]))*  # a full stop at the end is the sentence's
      )
    """,
    re.VERBOSE,
)
_UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    """Commands whose ValueError and OSError are printed in one line, without a traceback."""

    words: Sequence[str] = ()
    """The words of the command line after the program."""
    parameters: Sequence[Any] = ()
    """Arguments and options of the running command."""
    all_commands: Mapping[str, Any] = {}
    """All commands by name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.parent is None:
            Commands.words = tuple(args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        Commands.parameters = () if command is None else command.params
        Commands.all_commands = ctx.find_root().command.commands
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        Commands.parameters = self.params
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "torchvision", "timm", "safetensors", "huggingface_hub", "scipy"):
                raise
            from progresvit.io.extras import not_installed

            typer.echo(f"error: {not_installed(error.name)}", err=True)
            raise typer.Exit(code=2) from error
        except _UsageError as error:  # a file name that begins with a dash counts as an option
            error.message = printable(error.message)
            raise
        except (ValueError, OSError) as error:
            typer.echo(f"error: {in_options(_with_remedy(error))}", err=True)
            raise typer.Exit(code=2) from error


def in_options(message: str) -> str:
    """The message on one line, with ``name=value`` written as options of the running command.

    ``overwrite=True`` becomes ``--overwrite``, ``device='cpu'`` becomes ``--device cpu``, a key of a recipe,
    ``optimizer.batch=64``, becomes ``--set optimizer.batch=64``, and the subject of ``top_k must be at most 4`` becomes
    ``--top-k``. Names that are not options of the command stay as they are. If the message names another command, as in
    ``progresvit evaluate``, it may have the option.
    """
    options: dict[str, Any] = {}
    names = re.findall(r"\bprogresvit ([a-z-]+)", message)
    named = [Commands.all_commands[name] for name in names if name in Commands.all_commands]
    for parameter in (*(parameter for command in named for parameter in command.params), *Commands.parameters):
        if parameter.param_type_name == "option":
            arguments = {parameter.name, *(flag.lstrip("-").replace("-", "_") for flag in parameter.opts)}
            options |= dict.fromkeys(arguments, parameter)

    def translate(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if match["subject"] in options:
            return str(options[match["subject"]].opts[0])
        if name is not None and "." in name and "set" in options:
            return f"--set {match[0]}"
        option = options.get(name)
        if option is None or value == "None":
            return match[0]
        if option.is_flag:
            flags = {"True": option.opts, "False": option.secondary_opts}.get(value)
            return flags[0] if flags else match[0]
        text = value.strip("()[]'\"")
        if value[:1] in ("(", "["):
            text = re.sub(r"['\"\s]", "", text)  # ('a', 'b') -> a,b
        return f"{option.opts[0]} {value if ' ' in text else text}".rstrip()

    return _ARGUMENT.sub(translate, printable(message)).replace(" set --set ", " use --set ")


def _with_remedy(error: ValueError | OSError) -> str:
    """The message of an error; a full disk gets a remedy if the message has none."""
    from progresvit.io.files import NO_SPACE, WriteError

    is_full = isinstance(error, OSError) and error.errno in NO_SPACE and not isinstance(error, WriteError)
    return f"{error}; free some space there and run the same command again." if is_full else str(error)
