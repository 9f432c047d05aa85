"""`xtk completion`: the script with which a shell completes commands, options and their values."""

from __future__ import annotations

from dataclasses import dataclass

from xtk import terminal
from xtk.options.declaration import REQUIRED, CommandOptions, argument

COMPLETION_VARIABLE = "_XTK_COMPLETE"  # set by the script when the shell needs completions
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, kw_only=True)
class CompletionOptions(CommandOptions):
    """Options of `xtk completion`."""

    shell: str = argument(REQUIRED, "Shell: bash, zsh or fish.", metavar="SHELL", choices=SHELLS)


def completion(options: CompletionOptions) -> None:
    """Print the script that lets a shell complete commands and options.

    Add it to ~/.bashrc, to ~/.zshrc after compinit, or to the completions of fish; it is active in new shells.

    Examples:
        xtk completion bash >> ~/.bashrc
        xtk completion fish > ~/.config/fish/completions/xtk.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    for line in get_completion_script(
        prog_name="xtk", complete_var=COMPLETION_VARIABLE, shell=options.shell
    ).splitlines():
        terminal.result_line_unescaped(line)
