"""Run the ```sh blocks of a page, one after the other, in one folder: what the manual shows, works."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> int:
    """Run the blocks of the pages named; stop at the first that fails."""
    for page in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            for block in BLOCK.findall(page.read_text(encoding="utf-8")):
                sys.stderr.write(f"{page}:\n{block}")
                done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, check=False)
                if done.returncode:
                    sys.stderr.write(f"{page}: exit code {done.returncode}\n")
                    return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
