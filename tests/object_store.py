"""A local S3 server (moto) as a process; tests can delay its requests, cut its connections and list its requests.

Run as a script, it serves. In its folder, the file `requests` gets a line for each request, the file `gone` cuts all
connections while it exists, and the file `hold` delays requests whose method and path contain its text.
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
    """A running server.

    Args:
        folder: for the log of requests and the files that control the server.
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
        """Return the method and path of each request received so far."""
        path = self.folder / "requests"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, text: str, seconds: float = 120) -> None:
        """Wait until a request that contains a text has been received."""
        deadline = time.monotonic() + seconds
        while not any(text in line for line in self.requests()):
            assert time.monotonic() < deadline, f"no request for {text}"
            time.sleep(0.01)

    def cut_connections(self, unavailable: bool) -> None:
        """Cut the connection of every request from now on, or serve requests again."""
        (self.folder / "gone").touch() if unavailable else (self.folder / "gone").unlink(missing_ok=True)

    def hold_requests(self, text: str | None) -> None:
        """Delay requests whose method and path contain a text; None: stop delaying, and cut the delayed ones."""
        (self.folder / "hold").write_text(text) if text else (self.folder / "hold").unlink(missing_ok=True)


def _serve(folder: Path) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    moto_app = DomainDispatcherApplication(create_backend_app)

    def app(environ, start_response):  # type: ignore[no-untyped-def]
        request_line = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{environ['QUERY_STRING']}"
        with (folder / "requests").open("a") as log:
            log.write(request_line + "\n")
        hold_file = folder / "hold"
        was_held = False
        while hold_file.exists() and hold_file.read_text() in request_line:
            was_held = True
            time.sleep(0.01)
        if was_held or (folder / "gone").exists():
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("cut")
        return moto_app(environ, start_response)

    server = make_server("127.0.0.1", 0, app, threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    os.environ.update(CREDENTIALS)
    _serve(Path(sys.argv[1]))
