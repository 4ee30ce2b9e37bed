"""Messages name arguments of Python; a command prints them as its own options."""

import pytest
import typer
from typer.testing import CliRunner

from progresvit.cli import app
from progresvit.cli.errors import Commands, in_options

COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize(
    ("command", "message", "printed"),
    [
        ("classify", "a.csv already exists; pass overwrite=True.", "a.csv already exists; pass --overwrite."),
        ("classify", "use json=True", "use --json"),
        ("classify", "a larger max_pixels=… allows more", "a larger --max-pixels … allows more"),
        ("classify", "workers=0.", "--workers 0."),
        ("classify", "top_k must be at most 4", "--top-k must be at most 4"),
        ("classify", "a batch must be full; k must be odd", "a batch must be full; k must be odd"),
        ("classify", "use threshold=0.35, or device='cpu'.", "use --threshold 0.35, or --device cpu."),
        ("classify", 'device="cuda:1".', "--device cuda:1."),
        ("classify", "router=my_module:my_router", "--router my_module:my_router"),
        ("classify", "Engine(max_pixels=…) allows more", "Engine(max_pixels=…) allows more"),
        ("classify", "precision='bf16' (not 'fp8')", "--precision bf16 (not 'fp8')"),
        ("classify", "photos/workers=2/a, other=3, threshold=None", "photos/workers=2/a, other=3, threshold=None"),
        ("classify", "use optimizer.batch=64", "use optimizer.batch=64"),
        ("train", "lower optimizer.batch=64.", "lower --set optimizer.batch=64."),
        ("train", "such as --set optimizer.batch=64", "such as --set optimizer.batch=64"),
        ("train", "data.train=… and data.val=…", "--set data.train=… and --set data.val=…"),
        ("train", "optimizer.lr=1e-05, resume=True", "--set optimizer.lr=1e-05, --resume"),
        ("train", "recipe='192_240'", "recipe='192_240'"),
        ("import-official", "resolutions=(192, 240)", "--resolutions 192,240"),
        ("evaluate", "name them with restrict_classes=False", "name them with restrict_classes=False"),
    ],
)  # fmt: skip
def test_an_argument_is_printed_as_the_option_of_the_command(command, message, printed, monkeypatch):
    monkeypatch.setattr(Commands, "parameters", COMMANDS[command].params)
    assert in_options(message) == printed


def fail(kernels: bool = True, split: str = "") -> None:
    raise ValueError("pass kernels=False, kernels=True or split='.'")


def test_an_option_of_the_command_that_the_message_names_is_printed(monkeypatch):
    monkeypatch.setattr(Commands, "all_commands", COMMANDS)
    monkeypatch.setattr(Commands, "parameters", COMMANDS["trust"].params)
    message = "run progresvit evaluate again with keep_logits=True."
    assert in_options(message) == "run progresvit evaluate again with --logits."


def fail_without_options() -> None:
    raise OSError("pass split='.'")


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["fail"], "error: pass --no-kernels, --kernels or --split .\n"),
        (["group", "fail"], "error: pass --no-kernels, --kernels or --split .\n"),
        (["fail-without-options"], "error: pass split='.'\n"),
    ],
)
def test_an_error_is_printed_in_the_options_of_the_running_command(words, printed):
    whole, group = typer.Typer(cls=Commands), typer.Typer(cls=Commands)
    whole.command("fail")(fail)
    whole.command("fail-without-options")(fail_without_options)
    group.command("fail")(fail)
    group.command("other")(fail_without_options)
    whole.add_typer(group, name="group")
    result = CliRunner().invoke(whole, words)
    assert (result.exit_code, result.stderr) == (2, printed)
