"""Sends alerts by e-mail and to a webhook, and appends them to a file. No torch.

The password and the webhook URL (with its token) are secret. Both come from files or the environment, never
from the command line, which every user of the host can read. Error messages never contain secrets.
"""

import base64
import json
import smtplib
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

from moe_exp.config import raise_for
from moe_exp.host.files import expanded, regular

PASSWORD_VARIABLE, WEBHOOK_VARIABLE = "SMTP_PASSWORD", "WATCH_WEBHOOK"
_SECONDS = 30.0  # timeout for a server
_LONGEST_TEXT = 3500  # characters; Slack truncates longer ones

Security = Literal["tls", "starttls", "none"]


class PartlySent(Exception):
    """Raised if the server refused some recipients. Resending is useless: they would be refused again."""


@dataclass(frozen=True)
class Mail:
    """E-mail through an SMTP server, with TLS, STARTTLS or no encryption. Logs in only if `user` is set."""

    host: str
    port: int
    security: Security
    user: str
    password: str
    sender: str
    to: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"e-mail via {self.host}:{self.port}"

    @property
    def secrets(self) -> tuple[str, ...]:
        # server errors may quote the login, which encodes the password (AUTH PLAIN and LOGIN)
        sent = (f"\0{self.user}\0{self.password}", self.password)
        return (self.password, *(base64.b64encode(text.encode()).decode() for text in sent if self.password))

    def send(self, subject: str, text: str) -> None:
        """Sends a message. Failures raise OSError or SMTPException; partial failures raise PartlySent."""
        message = EmailMessage()
        message["Subject"], message["From"], message["To"] = _line(subject), self.sender, ", ".join(self.to)
        message["Date"] = formatdate(localtime=True)
        message["Message-ID"] = make_msgid(domain=socket.gethostname() or "localhost")
        message["Auto-Submitted"] = "auto-generated"  # prevents out-of-office replies
        message.set_content(text)
        context = ssl.create_default_context()
        connect = partial(smtplib.SMTP_SSL, context=context) if self.security == "tls" else smtplib.SMTP
        with connect(self.host, self.port, timeout=_SECONDS) as server:
            if self.security == "starttls":
                server.starttls(context=context)
            if self.user:
                server.login(self.user, self.password)
            if refused := server.send_message(message):
                raise PartlySent(f"refused for {', '.join(refused)}")


@dataclass(frozen=True)
class Webhook:
    """A webhook that accepts Slack's message format, {"text": ...}, by POST."""

    url: str

    @property
    def name(self) -> str:
        return f"webhook at {urllib.parse.urlsplit(self.url).hostname}"

    @property
    def secrets(self) -> tuple[str, ...]:
        parts = urllib.parse.urlsplit(self.url)
        return (self.url, parts.path, parts.query, parts.password or "")

    def send(self, subject: str, text: str) -> None:
        """Sends a message; raises OSError on failure."""
        # Slack interprets & < > as links and mentions
        said = escape(f"*{_line(subject)}*\n{text}"[:_LONGEST_TEXT], quote=False)
        data = json.dumps({"text": said}).encode()
        request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            answer.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would follow a redirect without sending the message, but report success."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class AlertFile:
    path: Path
    secrets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"file {self.path}"

    def send(self, subject: str, text: str) -> None:
        """Appends a message to the file; raises OSError on failure."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {_line(subject)}\n" + "".join(f"    {line}\n" for line in text.splitlines()))


Channel = Mail | Webhook | AlertFile


def send_to_all(channels: Sequence[Channel], subject: str, text: str) -> dict[str, str]:
    """Sends a message to all channels; returns errors by channel name, with secrets replaced by ***."""
    failed = {}
    for channel in channels:
        try:
            channel.send(subject, text)
        except PartlySent as error:
            failed[f"{channel.name} in part"] = str(error)
        # sockets, TLS, SMTP, HTTP, encodings: no error may prevent the other channels from being tried
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            # longest first: a URL contains its path; a path of "/" alone is no secret
            for secret in sorted((one for one in channel.secrets if len(one) > 1), key=len, reverse=True):
                reason = reason.replace(secret, "***")
            failed[channel.name] = reason
    return failed


def channels_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> list[Channel]:
    """Returns the channels configured by options and environment; raises ConfigError with all problems."""
    flags = _Flags(options, environ)
    channels = [flags.mail(), flags.webhook(), flags.alert_file()]
    raise_for(flags.problems)
    return [channel for channel in channels if channel is not None]


@dataclass
class _Flags:
    """Reads alert channels from their settings and collects problems. Options not given are empty or None."""

    options: Mapping[str, Any]
    environ: Mapping[str, str]
    problems: list[str] = field(default_factory=list)

    def _wrong(self, name: str, value: object, rule: str, fix: str) -> None:
        self.problems.append(f"{name}={value}: {rule}. Fix: {fix}.")

    def mail(self) -> Mail | None:
        given = {name: self.options.get(name) or "" for name in ("mail_to", "mail_from", "smtp", "smtp_user")}
        if not (to := tuple(given["mail_to"].replace(",", " ").split())):
            if given["smtp"]:
                self._wrong("--smtp", given["smtp"], "requires --mail-to", "set --mail-to or omit --smtp")
            return None
        host, _, port = (given["smtp"] or "localhost").partition(":")
        security: Security = self.options.get("smtp_security") or "starttls"
        port = port or {"tls": "465", "starttls": "587", "none": "25"}[security]
        number = int(port) if port.isdecimal() else 0
        password = self._secret("smtp_password_file", PASSWORD_VARIABLE)
        user, sender = given["smtp_user"], given["mail_from"] or f"moe-exp@{socket.getfqdn()}"
        for name, address in [("--mail-to", address) for address in to] + [("--mail-from", sender)]:
            if address.count("@") != 1 or not address.isprintable() or not address.isascii():
                self._wrong(name, address, "is not an e-mail address", "write name@host")
        if not 0 < number < 65536 or not host:
            fix = "write HOST:PORT, such as mail.example.org:587"
            self._wrong("--smtp", f"{host}:{port}", "must be a host and a port", fix)
        if user and not password:
            fix = f"set {PASSWORD_VARIABLE} or --smtp-password-file"
            self._wrong("--smtp-user", user, "requires a password", fix)
        # plain text is safe between two processes of the same host
        if user and security == "none" and host not in ("localhost", "127.0.0.1", "::1"):
            rule = "would send the password in plain text"
            self._wrong("--smtp-security", "none", rule, "use starttls or tls")
        return Mail(host, number, security, user, password, sender, to)

    def webhook(self) -> Webhook | None:
        if not (url := self._secret("webhook_file", WEBHOOK_VARIABLE)):
            return None
        with suppress(ValueError):  # brackets without an IPv6 address
            parts = urllib.parse.urlsplit(url)
            is_plain = url.isascii() and url.isprintable() and " " not in url
            if is_plain and parts.scheme in ("http", "https") and parts.hostname:
                return Webhook(url)
        name = "--webhook-file" if self.options.get("webhook_file") else WEBHOOK_VARIABLE
        # the URL is a secret: do not print it
        self._wrong(name, "***", "must be a webhook URL", "write https://HOST/... on one line")
        return None

    def alert_file(self) -> AlertFile | None:
        if not self.options.get("alert_file"):
            return None
        path = expanded(self.options["alert_file"]).absolute()
        if not path.parent.is_dir():
            fix = "create the folder or name another file"
            self._wrong("--alert-file", path, "the parent folder does not exist", fix)
        return AlertFile(path)

    def _secret(self, name: str, variable: str) -> str:
        """Line 1 of the file in option `name`. Without this option, the environment variable `variable`."""
        if not (file := self.options.get(name)):
            return self.environ.get(variable, "")
        flag, secret = f"--{name.replace('_', '-')}", ""
        try:
            secret = regular(expanded(file)).read_text(encoding="utf-8").partition("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", "") or type(error).__name__
            fix = "specify a file with the secret on its first line and mode 600"
            self._wrong(flag, file, f"cannot be read ({reason})", fix)
        else:
            if not secret:
                self._wrong(flag, file, "its first line is empty", "write the secret in line 1")
        return secret


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
