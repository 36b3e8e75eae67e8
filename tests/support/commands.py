"""The `sidesave` command, called in this process: what it prints, and its exit status."""

import json
from typing import Any

from typer.testing import CliRunner, Result

from sidesave.client.cli.main import app


def sidesave_cli(*arguments: object) -> Result:
    return CliRunner().invoke(
        app, [str(argument) for argument in arguments], catch_exceptions=False
    )


def output(*arguments: object, status: int = 0) -> str:
    result = sidesave_cli(*arguments)
    assert result.exit_code == status, result.output
    return result.output


def as_json(*arguments: object, status: int = 0) -> Any:
    return json.loads(output(*arguments, "--json", status=status))
