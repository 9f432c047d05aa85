"""A real S3 server on this machine, moto's, as a process that tests can hold up, cut off and ask what came.

Run as a script it serves; in its folder `requests` gets a line for each request, `gone` cuts all connections while it
is there, and `hold` makes requests wait whose method and path hold the text in it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """The server, seen from a test.

    Args:
        folder: where it keeps its log.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.env = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_MAX_ATTEMPTS": "2",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def requests(self) -> list[str]:
        """Return method and path of each request that came."""
        path = self.folder / "requests"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until a request came that holds a text."""
        until = time.monotonic() + seconds
        while not any(text in line for line in self.requests()):
            assert time.monotonic() < until, f"no request for {text}"
            time.sleep(0.01)

    def cut(self, gone: bool) -> None:
        """Let no request through, or let them through again."""
        (self.folder / "gone").touch() if gone else (self.folder / "gone").unlink(missing_ok=True)

    def hold(self, text: str | None) -> None:
        """Make requests wait whose method and path hold a text; None: no more, and cut those that wait."""
        (self.folder / "hold").write_text(text) if text else (self.folder / "hold").unlink(missing_ok=True)


def _serve(folder: Path) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    inner = DomainDispatcherApplication(create_backend_app)

    def app(environ, start_response):  # type: ignore[no-untyped-def]
        line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with (folder / "requests").open("a") as log:
            log.write(line + "\n")
        hold = folder / "hold"
        held = False
        while hold.exists() and hold.read_text() in line:
            held = True
            time.sleep(0.01)
        if held or (folder / "gone").exists():
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("cut")
        return inner(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    os.environ.update(CREDENTIALS)
    _serve(Path(sys.argv[1]))
