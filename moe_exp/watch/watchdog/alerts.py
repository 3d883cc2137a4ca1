"""Sends messages by e-mail, to a webhook and into a file. No torch.

Secrets (the password, and the webhook URL with its token) come from files or the environment, never from the
command line, which every user of the host can read. Error messages never contain them.
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
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Literal

from moe_exp.config import ConfigError
from moe_exp.host.files import expanded, regular

PASSWORD_VARIABLE = "SMTP_PASSWORD"
WEBHOOK_VARIABLE = "WATCH_WEBHOOK"
_SECONDS = 30.0  # timeout of a server
_LONGEST_TEXT = 3500  # characters; Slack truncates longer ones

Security = Literal["tls", "starttls", "none"]


class PartlySent(Exception):
    """Some recipients got the message; sending it again would not help the others."""


@dataclass(frozen=True)
class Mail:
    """E-mail through an SMTP server: TLS from the first byte, STARTTLS before the login, or neither; no login
    without `user`.
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
        # Also as a login sends them: PLAIN and LOGIN.
        sent = (f"\0{self.user}\0{self.password}", self.password)
        return (self.password, *(base64.b64encode(text.encode()).decode() for text in sent if self.password))

    def send(self, subject: str, text: str) -> None:
        """Sends a message; raises OSError or SMTPException on failure, PartlySent if only some got it."""
        message = EmailMessage()
        message["Subject"], message["From"], message["To"] = _line(subject), self.sender, ", ".join(self.to)
        message["Date"] = formatdate(localtime=True)
        message["Message-ID"] = make_msgid(domain=socket.gethostname() or "localhost")
        message["Auto-Submitted"] = "auto-generated"  # prevents out-of-office replies
        message.set_content(text)
        context = ssl.create_default_context()
        is_tls = self.security == "tls"
        connect = partial(smtplib.SMTP_SSL, context=context) if is_tls else smtplib.SMTP
        with connect(self.host, self.port, timeout=_SECONDS) as server:
            if self.security == "starttls":
                server.starttls(context=context)
            if self.user:
                server.login(self.user, self.password)
            if refused := server.send_message(message):
                raise PartlySent(f"refused for {', '.join(refused)}")


@dataclass(frozen=True)
class Webhook:
    """A webhook that takes Slack's message format, {"text": ...}, by POST."""

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
        # & < > mark links and mentions in Slack
        said = escape(f"*{_line(subject)}*\n{text}"[:_LONGEST_TEXT], quote=False)
        data = json.dumps({"text": said}).encode()
        request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=_SECONDS) as answer:
            answer.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would query the new address without the message, and treat the answer as success."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True)
class AlertFile:
    """A file to which messages are appended."""

    path: Path

    @property
    def name(self) -> str:
        return f"file {self.path}"

    @property
    def secrets(self) -> tuple[str, ...]:
        return ()

    def send(self, subject: str, text: str) -> None:
        """Appends a message; raises OSError on failure."""
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{now} {_line(subject)}\n" + "".join(f"    {line}\n" for line in text.splitlines()))


Channel = Mail | Webhook | AlertFile


def send_to_all(channels: Sequence[Channel], subject: str, text: str) -> dict[str, str]:
    """Sends a message to all channels, even if some fail.

    Returns reasons of failures by channel name, with *** for secrets; `NAME in part` if it reached some
    recipients.
    """
    failed = {}
    for channel in channels:
        try:
            channel.send(subject, text)
        except PartlySent as error:
            failed[f"{channel.name} in part"] = str(error)
        # sockets, TLS, SMTP, HTTP, encodings: no error may keep the other channels from their message
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            for secret in sorted((one for one in channel.secrets if len(one) > 1), key=len, reverse=True):
                reason = reason.replace(secret, "***")
            failed[channel.name] = reason
    return failed


def channels_of(options: Mapping[str, Any], environ: Mapping[str, str]) -> list[Channel]:
    """The channels configured by the command line and the environment.

    Args:
        options: mail_to, mail_from, smtp, smtp_security, smtp_user, smtp_password_file, webhook_file,
            alert_file; empty or None: not given.
        environ: with SMTP_PASSWORD and WATCH_WEBHOOK.

    Raises:
        ConfigError: with all problems.
    """
    problems: list[str] = []
    channels: list[Channel] = []
    channels += filter(None, (_mail(options, environ, problems), _webhook(options, environ, problems)))
    if options.get("alert_file"):
        path = expanded(options["alert_file"]).absolute()
        channels.append(AlertFile(path))
        if not path.parent.is_dir():
            rule, fix = "its folder is not there", "make it, or name another file"
            problems.append(_problem("--alert-file", path, rule, fix))
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
    variable = environ.get(PASSWORD_VARIABLE, "")
    password = _secret(options.get("smtp_password_file"), variable, "--smtp-password-file", problems)
    user, sender = options.get("smtp_user") or "", options.get("mail_from") or f"moe-exp@{socket.getfqdn()}"
    mail = Mail(host, int(port) if port.isdecimal() else 0, security, user, password, sender, to)
    problems += _mail_problems(mail, port)
    return mail


def _mail_problems(mail: Mail, port: str) -> Iterator[str]:
    for name, addresses in (("--mail-to", mail.to), ("--mail-from", [mail.sender])):
        for address in addresses:
            if address.count("@") != 1 or not address.isprintable() or not address.isascii():
                yield _problem(name, address, "is no address", "write name@host")
    if not 0 < mail.port < 65536 or not mail.host:
        rule, fix = "is no host and port", "write HOST:PORT, as mail.example.org:587"
        yield _problem("--smtp", f"{mail.host}:{port}", rule, fix)
    if mail.user and not mail.password:
        rule, fix = f"has no password in {PASSWORD_VARIABLE}", "set it, or give --smtp-password-file"
        yield _problem("--smtp-user", mail.user, rule, fix)
    if mail.user and mail.security == "none" and mail.host not in ("localhost", "127.0.0.1", "::1"):
        rule = "would send the password as plain text"
        yield _problem("--smtp-security", "none", rule, "use starttls or tls")


def _webhook(options: Mapping[str, Any], environ: Mapping[str, str], problems: list[str]) -> Webhook | None:
    url = _secret(options.get("webhook_file"), environ.get(WEBHOOK_VARIABLE, ""), "--webhook-file", problems)
    if not url:
        return None
    try:
        parts = urllib.parse.urlsplit(url)
        is_web = parts.scheme in ("http", "https") and parts.hostname
        good = is_web and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        good = False
    if good:
        return Webhook(url)
    name = "--webhook-file" if options.get("webhook_file") else WEBHOOK_VARIABLE
    rule, fix = "is no address of a webhook", "write https://HOST/..., on one line"
    problems.append(_problem(name, "***", rule, fix))  # without the secret value
    return None


def _secret(file: str | None, variable: str, name: str, problems: list[str]) -> str:
    """The first line of a file, or else the value of the variable."""
    if not file:
        return variable
    try:
        lines = regular(expanded(file)).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or type(error).__name__
        rule, fix = f"cannot be read ({reason})", "name a file that holds the secret, with mode 600"
        problems.append(_problem(name, file, rule, fix))
        return ""
    if not lines[0].strip():
        problems.append(_problem(name, file, "has nothing on its first line", "write the secret there"))
    return lines[0].strip()


def _problem(name: str, value: object, rule: str, fix: str) -> str:
    """Like config.problem, for a flag, which is not in capitals."""
    return f"{name}={value}: {rule}. Fix: {fix}."


def _line(text: str) -> str:
    return " ".join(text.split())[:200]
