"""Usage errors of command lines in the style of all other errors."""

from __future__ import annotations

from typing import Any

from xtk.errors import XtkError
from xtk.name_registry import did_you_mean

EXIT_USAGE = 2


def usage_error(failure: Any) -> XtkError:
    """Return a usage error of typer as an XtkError: what, and the command that helps."""
    help_hint = f"{failure.ctx.command_path if failure.ctx is not None else 'xtk'} --help"
    match type(failure).__name__:
        case "NoSuchOption":
            near = did_you_mean(failure.option_name, failure.possibilities or ())
            error = XtkError(f"no option called {failure.option_name}{near}", hint=None if near else f"{help_hint}-all")
        case "MissingParameter":
            parameter = failure.param
            name = parameter.metavar or parameter.name.upper()
            if parameter.param_type_name == "option":
                name = f"{parameter.opts[-1]} {name}"
            example = (failure.ctx.command.epilog or "").partition("\n")[0]
            error = XtkError(f"{name} is missing", hint=f"for example: {example}" if example else help_hint)
        case "BadParameter" if failure.param is None:  # raised by a command, with the next step in its message
            error = XtkError(failure.message)
        case _:
            text = failure.format_message().replace("Got unexpected extra argument(s)", "too many arguments:")
            error = XtkError((text[:1].lower() + text[1:]).removesuffix("."), hint=help_hint)
    error.exit_code = failure.exit_code
    return error
