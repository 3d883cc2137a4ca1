"""Sends a message by e-mail, to a webhook and into a file. No torch.

Secrets (the password, the address of a webhook, which has a token in it) come from files or the environment,
never from the command line, which every user of the host can read; and no message about an error has them.
"""

from __future__ import annotations

import base64
import json
import smtplib
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import Any, Literal

from moe_exp.config import ConfigError

PASSWORD_VARIABLE = "SMTP_PASSWORD"
WEBHOOK_VARIABLE = "WATCH_WEBHOOK"
_SECONDS = 30.0  # that a server may take
_LONGEST_TEXT = 3500  # characters; Slack cuts off longer ones

Security = Literal["tls", "starttls", "none"]


class PartlySent(Exception):
    """Some have got the message, and sending it again would not help the others."""


@dataclass(frozen=True)
class Mail:
    """A way to send e-mail.

    Attributes:
        host, port: of the SMTP server.
        security: tls from the first byte, starttls before the login, or none.
        user: for the login; empty: without one.
        password: its.
        sender, to: addresses.
    """

    host: str
    port: int
    security: Security
    user: str
    password: str
    sender: str
    to: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"e-mail by {self.host}:{self.port}"

    @property
    def secrets(self) -> tuple[str, ...]:
        # As a login sends them, too: PLAIN, and LOGIN.
        sent = (f"\0{self.user}\0{self.password}", self.password)
        return (self.password, *(base64.b64encode(text.encode()).decode() for text in sent if self.password))

    def send(self, subject: str, text: str) -> None:
        """Raises OSError or SMTPException where it cannot, PartlySent where it can for some."""
        message = EmailMessage()
        message["Subject"], message["From"], message["To"] = _line(subject), self.sender, ", ".join(self.to)
        message["Date"], message["Message-ID"] = (
            formatdate(localtime=True),
            make_msgid(domain=socket.gethostname() or "localhost"),
        )
        message["Auto-Submitted"] = "auto-generated"  # or somebody's notice of absence answers every time
        message.set_content(text)
        context = ssl.create_default_context()
        if self.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(self.host, self.port, timeout=_SECONDS, context=context)
        else:
            server = smtplib.SMTP(self.host, self.port, timeout=_SECONDS)
        with server:
            if self.security == "starttls":
                server.starttls(context=context)
            if self.user:
                server.login(self.user, self.password)
            if refused := server.send_message(message):
                raise PartlySent(f"refused for {', '.join(refused)}")


@dataclass(frozen=True)
class Webhook:
    """An address that takes Slack's form of a message, {"text": ...}, by POST."""

    url: str

    @property
    def name(self) -> str:
        return f"webhook at {urllib.parse.urlsplit(self.url).hostname}"

    @property
    def secrets(self) -> tuple[str, ...]:
        parts = urllib.parse.urlsplit(self.url)
        return (self.url, parts.path, parts.query, parts.password or "")

    def send(self, subject: str, text: str) -> None:
        """Raises OSError where it cannot."""
        said = f"*{_line(subject)}*\n{text}"[:_LONGEST_TEXT]
        # which mean links and mentions there
        for character, written in {"&": "&amp;", "<": "&lt;", ">": "&gt;"}.items():
            said = said.replace(character, written)
        request = urllib.request.Request(
            self.url, json.dumps({"text": said}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            answer.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would ask the other address without the message, and take its answer for success."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class AlertFile:
    """A file that messages are added to."""

    path: Path

    @property
    def name(self) -> str:
        return f"file {self.path}"

    @property
    def secrets(self) -> tuple[str, ...]:
        return ()

    def send(self, subject: str, text: str) -> None:
        """Raises OSError where it cannot."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {_line(subject)}\n" + "".join(f"    {line}\n" for line in text.splitlines()))


Channel = Mail | Webhook | AlertFile


def send_to_all(channels: Sequence[Channel], subject: str, text: str) -> dict[str, str]:
    """Sends a message by every channel, whatever becomes of the others.

    Returns:
        Why those failed that have, by name and without secrets; by `NAME in part` where somebody was reached.
    """
    failed = {}
    for channel in channels:
        try:
            channel.send(subject, text)
        except PartlySent as error:
            failed[f"{channel.name} in part"] = str(error)
        # of sockets, TLS, SMTP, HTTP, encodings: none of them may keep the other channels from their message
        except Exception as error:
            failed[channel.name] = without_secrets(f"{type(error).__name__}: {error}", channel.secrets)
    return failed


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """`text` in a line, with *** for each of `secrets`."""
    text = " ".join(text.split())
    for secret in sorted((one for one in secrets if len(one) > 1), key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def channels_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> list[Channel]:
    """The channels that options of the command line and the environment name.

    Args:
        options: mail_to, mail_from, smtp, smtp_security, smtp_user, smtp_password_file, webhook_file,
            alert_file; empty or None: not given.
        environ: with SMTP_PASSWORD and WATCH_WEBHOOK.

    Raises:
        ConfigError: with everything that is wrong with them.
    """
    problems: list[str] = []
    channels: list[Channel] = []
    for channel in (_mail(options, environ, problems), _webhook(options, environ, problems)):
        if channel is not None:
            channels.append(channel)
    if options.get("alert_file"):
        path = Path(options["alert_file"]).expanduser().absolute()
        channels.append(AlertFile(path))
        if not path.parent.is_dir():
            problems.append(
                _problem("--alert-file", path, "its folder is not there", "make it, or name another file")
            )
    if problems:
        raise ConfigError(problems)
    return channels


def _mail(options: Mapping[str, Any], environ: Mapping[str, str], problems: list[str]) -> Mail | None:
    to = tuple((options.get("mail_to") or "").replace(",", " ").split())
    if not to:
        if options.get("smtp"):
            problems.append(_problem("--smtp", options["smtp"], "is there without --mail-to", "say to whom"))
        return None
    host, _, port_text = (options.get("smtp") or "localhost").partition(":")
    security: Security = options.get("smtp_security") or "starttls"
    port = port_text or {"tls": "465", "starttls": "587", "none": "25"}[security]
    password = _secret(
        options.get("smtp_password_file"),
        environ.get(PASSWORD_VARIABLE, ""),
        "--smtp-password-file",
        problems,
    )
    user, sender = options.get("smtp_user") or "", options.get("mail_from") or f"moe-exp@{socket.getfqdn()}"
    problems += list(
        _mail_problems(
            to=to, sender=sender, host=host, port=port, user=user, password=password, security=security
        )
    )
    return Mail(host, int(port) if port.isdecimal() else 0, security, user, password, sender, to)


def _mail_problems(
    *, to: Sequence[str], sender: str, host: str, port: str, user: str, password: str, security: str
) -> Iterator[str]:
    for name, addresses in (("--mail-to", to), ("--mail-from", [sender])):
        for address in addresses:
            if address.count("@") != 1 or not address.isprintable() or not address.isascii():
                yield _problem(name, address, "is no address", "write name@host")
    if not port.isdecimal() or not 0 < int(port) < 65536 or not host:
        yield _problem(
            "--smtp", f"{host}:{port}", "is no host and port", "write HOST:PORT, as mail.example.org:587"
        )
    if user and not password:
        yield _problem(
            "--smtp-user",
            user,
            f"has no password in {PASSWORD_VARIABLE}",
            "set it, or give --smtp-password-file",
        )
    if user and security == "none" and host not in ("localhost", "127.0.0.1", "::1"):
        yield _problem(
            "--smtp-security", "none", "would send the password as plain text", "use starttls or tls"
        )


def _webhook(options: Mapping[str, Any], environ: Mapping[str, str], problems: list[str]) -> Webhook | None:
    url = _secret(options.get("webhook_file"), environ.get(WEBHOOK_VARIABLE, ""), "--webhook-file", problems)
    if not url:
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and url.isascii()
            and url.isprintable()
            and " " not in url
        )
    except ValueError:
        good = False
    if not good:  # without the value, which is a secret
        name = "--webhook-file" if options.get("webhook_file") else WEBHOOK_VARIABLE
        problems.append(
            _problem(name, "***", "is no address of a webhook", "write https://HOST/..., on one line")
        )
        return None
    return Webhook(url)


def _secret(file: str | None, variable: str, name: str, problems: list[str]) -> str:
    """The first line of a file, or else the value of the variable."""
    if not file:
        return variable
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or type(error).__name__
        problems.append(
            _problem(
                name, file, f"cannot be read ({reason})", "name a file that holds the secret, with mode 600"
            )
        )
        return ""
    if not lines[0].strip():
        problems.append(_problem(name, file, "has nothing on its first line", "write the secret there"))
    return lines[0].strip()


def _problem(name: str, value: object, rule: str, fix: str) -> str:
    """As config.problem, for a flag, which is not written in capitals."""
    return f"{name}={value}: {rule}. Fix: {fix}."


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
