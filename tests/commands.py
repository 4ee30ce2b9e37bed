"""Runs commands as a user types them, and checks that they work or are refused in one line."""

from typer.testing import CliRunner

from progresvit.cli import app


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def works(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(match, *arguments):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.output.strip().splitlines()[-1].startswith("error: "), result.output
    assert match in result.output
    assert "Traceback" not in result.output
