"""Earlier spellings of commands and options: for one version they answer with the new one, and do not run."""

from __future__ import annotations

from xtk.errors import XtkError

EXIT_USAGE = 2
# By command, or command and option.
RENAMED = {
    "import-cache": "xtk cache import",
    "export-cache": "xtk cache export",
    "align --output": "xtk align STUDENT TEACHER DATA --html FILE",
    "align -o": "xtk align STUDENT TEACHER DATA --html FILE",
    "cache-teacher --merge": "xtk cache merge",
    "distill --on-policy": "xtk distill-on-policy",
    "sweep --on-policy": "xtk sweep --command distill-on-policy",
    "evaluate --reward": "xtk evaluate-answers --reward",
    "evaluate --draft-for": "xtk evaluate-draft DRAFT TARGET PROMPTS",
    "evaluate --tasks": "xtk evaluate-tasks MODEL TASK",
    "inspect --teacher": "xtk cache verify CACHE TEACHER",
}


def renamed_error(spelling: str) -> XtkError | None:
    """Return the error for an earlier spelling; None: it is not one."""
    if spelling not in RENAMED:
        return None
    failure = XtkError(f"`xtk {spelling}` is now `{RENAMED[spelling]}`")
    failure.exit_code = EXIT_USAGE
    return failure
