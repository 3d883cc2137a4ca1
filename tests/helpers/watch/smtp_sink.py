"""A mail server on a real socket: keeps what it is sent; STARTTLS, TLS from the first byte, AUTH PLAIN."""

from __future__ import annotations

import base64
import socketserver
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Any


def certificate(folder: Path) -> tuple[Path, Path]:
    """A new certificate for localhost, signed by itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    names = "-subj /CN=localhost -addext subjectAltName=DNS:localhost"
    words = [*command.split(), *names.split(), "-keyout", key, "-out", cert]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


class SmtpSink:
    """`security`: tls, starttls (both need the `pair` of certificate and key) or none; `password`: of the
    user `watcher`; where it is empty no login is asked for.
    """

    def __init__(self, security: str = "none", pair: tuple[Path, Path] | None = None, password: str = ""):
        self.messages: list[bytes] = []
        self.recipients: list[str] = []
        self.is_encrypted: list[bool] = []
        self.unknown: tuple[str, ...] = ()  # recipients that are refused
        self.security, self.password = security, password
        self.context = None
        if pair is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(*pair)
        self.server = socketserver.ThreadingTCPServer(("localhost", 0), _session(self))
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def __enter__(self) -> SmtpSink:
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def _session(sink: SmtpSink) -> type[socketserver.BaseRequestHandler]:
    class Session(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.is_encrypted = sink.security == "tls"
            if self.is_encrypted:
                try:
                    self.request = sink.context.wrap_socket(self.request, server_side=True)
                except OSError:  # a client that does not trust the certificate
                    return
            self.is_known = not sink.password
            self.file = self.request.makefile("rb")
            self.say("220 sink")
            try:
                while (line := self.file.readline().decode().strip()) and self.answer(line):
                    pass
            except OSError:
                return
            finally:
                self.file.close()
                self.request.close()

        def say(self, *lines: str) -> None:
            text = [line[:3] + ("-" if line is not lines[-1] else " ") + line[4:] for line in lines]
            self.request.sendall("".join(f"{line}\r\n" for line in text).encode())

        def answer(self, line: str) -> bool:
            word = line.upper().partition(" ")[0]
            if word == "EHLO":
                can_encrypt = sink.security == "starttls" and not self.is_encrypted
                offered = ["250 STARTTLS"] * can_encrypt + ["250 AUTH PLAIN"] * bool(sink.password)
                self.say("250 sink", *offered, "250 8BITMIME")
            elif word == "STARTTLS":
                self.say("220 continue")
                self.request = sink.context.wrap_socket(self.request, server_side=True)
                self.file, self.is_encrypted = self.request.makefile("rb"), True
            elif word == "AUTH":
                self.is_known = base64.b64decode(line.split()[2]).decode() == f"\0watcher\0{sink.password}"
                wrong = f"535 {sink.password} is not what {line.split()[2]} says"
                self.say("235 welcome" if self.is_known else wrong)
            elif word == "MAIL":
                self.say("250 ok" if self.is_known else "530 who are you")
            elif word == "RCPT":
                sink.recipients.append(line)
                self.say("550 nobody" if any(address in line for address in sink.unknown) else "250 ok")
            elif word == "DATA":
                self.say("354 continue")
                lines = []
                while (part := self.file.readline()) not in (b".\r\n", b""):
                    lines.append(part)
                sink.messages.append(b"".join(lines))
                sink.is_encrypted.append(self.is_encrypted)
                self.say("250 kept")
            elif word == "QUIT":
                self.say("221 bye")
                return False
            else:
                self.say("250 ok")
            return True

    return Session
