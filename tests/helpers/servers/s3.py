"""moto's S3 server in a process of its own, some of whose requests fail; a client needs `environment`."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

BUCKET = "bucket"


@dataclass
class S3Server:
    """A server that runs."""

    url: str

    @property
    def environment(self):
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def fail(self, share):
        """Lets this share of all requests fail from now on, and counts anew."""
        return self._ask(f"/faults?share={share}")

    def counts(self):
        """Requests, and those of them that failed, since `fail`."""
        return self._ask("/faults")

    def _ask(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@contextlib.contextmanager
def s3_server():
    """Yields an S3Server with an empty bucket."""
    command = [sys.executable, str(Path(__file__))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        server = S3Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        request = urllib.request.Request(f"{server.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        yield server
    finally:
        process.kill()
        process.communicate()


class Faults:
    """Answers some requests with an error, or ends the connection, before or in the middle of the answer."""

    def __init__(self, app):
        self.app, self.share, self.random, self.lock = app, 0.0, random.Random(7), threading.Lock()
        self.requests = self.failed = 0

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == "/faults":
            return self._control(environ, start_response)
        with self.lock:
            self.requests += 1
            fails = self.random.random() < self.share
            self.failed += fails
            kind = self.random.choice(["busy", "broken", "closed", "cut"]) if fails else ""
        if kind in ("busy", "broken"):
            code = "SlowDown" if kind == "busy" else "InternalError"
            start_response("503 Slow Down" if kind == "busy" else "500 Error", [("Content-Type", "text/xml")])
            return [f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()]
        if kind == "closed":
            close(environ)
            raise ConnectionError("injected")
        answer = self.app(environ, start_response)
        return self._half(answer, environ) if kind == "cut" else answer

    def _half(self, answer, environ):
        for chunk in answer:
            yield chunk[: len(chunk) // 2]
            break
        close(environ)

    def _control(self, environ, start_response):
        if query := environ["QUERY_STRING"]:
            self.share, self.requests, self.failed = float(query.partition("=")[2]), 0, 0
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"requests": self.requests, "failed": self.failed}).encode()]


def close(environ):
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)


def serve():
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_):
            pass

    app = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    print(server.port, flush=True)
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # of the injected errors
    server.serve_forever()


if __name__ == "__main__":
    serve()
