"""Messages by e-mail, webhook and file, over real sockets; secrets stay secret."""

import base64
import email
import email.policy
import http.server
import json
import shutil
import threading

import pytest

from helpers.watch.smtp_sink import SmtpSink, certificate
from moe_exp.config import ConfigError
from moe_exp.watch.watchdog.alerts import AlertFile, Mail, Webhook, channels_of, send_to_all

SECRET = "s3cret-token"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, for a certificate")
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def webhook():
    """A server that keeps the bodies of POST, and answers as its path says: /500, /redirect, else 200."""
    bodies = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append((self.path, self.headers["Content-Type"], body))
            self.send_response(500 if "/500" in self.path else 302 if "/redirect" in self.path else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self):
            bodies.append((self.path, "GET", b""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://localhost:{server.server_address[1]}", bodies
        server.shutdown()


@pytest.mark.parametrize("security", ["none", "starttls", "tls"])
def test_mail(security, pair, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    with SmtpSink(security, pair, password=SECRET) as sink:
        sent = mail(sink.port, security, user="watcher", password=SECRET, to=("a@b.org", "c@d.org"))
        assert send_to_all([sent], "2 problems in\nrun", "line one\nüber 2") == {}
    assert sink.is_encrypted == [security != "none"]
    # "TO" before Python 3.13
    assert [line.lower() for line in sink.recipients] == ["rcpt to:<a@b.org>", "rcpt to:<c@d.org>"]
    (message,) = (email.message_from_bytes(text, policy=email.policy.default) for text in sink.messages)
    assert message["Subject"] == "2 problems in run"
    heads = [message[name] for name in ("From", "To", "Auto-Submitted")]
    assert heads == ["me@host", "a@b.org, c@d.org", "auto-generated"]
    assert message.get_content().splitlines() == ["line one", "über 2"]


def mail(port, security="none", *, user="", password="", to=("a@b.org",)):
    return Mail("localhost", port, security, user, password, "me@host", to)


def test_a_recipient_who_is_refused_keeps_nobody_from_the_message():
    with SmtpSink() as sink:
        sink.unknown = ("gone@b.org",)
        failed = send_to_all([mail(sink.port, to=("a@b.org", "gone@b.org"))], "s", "t")
    assert failed == {f"e-mail via localhost:{sink.port} in part": "refused for gone@b.org"}
    assert len(sink.messages) == 1


def test_a_certificate_that_nobody_knows_is_not_trusted(pair):
    with SmtpSink("tls", pair) as sink:
        (reason,) = send_to_all([mail(sink.port, "tls")], "s", "t").values()
    assert "certificate" in reason and sink.messages == []


def test_a_refused_login_is_told_without_the_password(pair, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(pair[0]))
    with SmtpSink("starttls", pair, password=SECRET) as sink:
        sent = mail(sink.port, "starttls", user="other", password=SECRET)
        (reason,) = send_to_all([sent], "s", "t").values()
    assert reason.startswith("SMTPAuthenticationError: (535, b'*** is not what")
    assert SECRET not in reason
    assert base64.b64encode(f"\0other\0{SECRET}".encode()).decode() not in reason


def test_webhook_gets_slacks_form(webhook):
    url, bodies = webhook
    hook = Webhook(f"{url}/services/{SECRET}")
    assert send_to_all([hook], "1 problem in run", "loss < 3 & <!channel>") == {}
    ((path, kind, body),) = bodies
    assert (path, kind) == (f"/services/{SECRET}", "application/json")
    assert json.loads(body) == {"text": "*1 problem in run*\nloss &lt; 3 &amp; &lt;!channel&gt;"}


@pytest.mark.parametrize(("path", "code"), [("500", 500), ("redirect", 302)])
def test_a_webhook_that_fails_is_named_without_its_token(path, code, webhook, tmp_path):
    url, bodies = webhook
    channels = [Webhook(f"{url}/{path}/{SECRET}?key={SECRET}"), AlertFile(tmp_path / "alerts.log")]
    failed = send_to_all(channels, "1 problem in run", "first\nsecond")
    assert list(failed) == ["webhook at localhost"]
    assert failed["webhook at localhost"].startswith(f"HTTPError: HTTP Error {code}")
    assert SECRET not in str(failed)
    assert [kind for _, kind, _ in bodies] == ["application/json"]
    head, *lines = (tmp_path / "alerts.log").read_text().splitlines()
    assert head.endswith(" 1 problem in run")
    assert lines == ["    first", "    second"]


def test_nobody_listens(tmp_path):
    with SmtpSink() as sink:
        port = sink.port
    failed = send_to_all([mail(port), AlertFile(tmp_path), AlertFile(tmp_path / "alerts.log")], "s", "t")
    assert list(failed) == [f"e-mail via localhost:{port}", f"file {tmp_path}"]
    assert "refused" in failed[f"e-mail via localhost:{port}"]
    assert (tmp_path / "alerts.log").exists()


def test_channels_from_options(tmp_path):
    (tmp_path / "password").write_text(f"{SECRET}\n")
    options = {"mail_to": "a@b.org, c@d.org", "mail_from": "me@b.org", "smtp": "mail.b.org"}
    options |= {"smtp_user": "watcher", "smtp_password_file": tmp_path / "password"}
    environ = {"WATCH_WEBHOOK": f"https://hooks.org/{SECRET}"}
    by_mail, hook, file = channels_of({**options, "alert_file": tmp_path / "x"}, environ)
    to = ("a@b.org", "c@d.org")
    assert by_mail == Mail("mail.b.org", 587, "starttls", "watcher", SECRET, "me@b.org", to)
    assert hook.name == "webhook at hooks.org"
    assert file.path == tmp_path / "x"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mail_to": "someone"}, "--mail-to=someone: is not an e-mail address."),
        ({"mail_to": "a@b", "smtp": "host:port"}, "--smtp=host:port: must be a host and a port."),
        ({"mail_to": "a@b", "smtp_user": "x"}, "--smtp-user=x: requires a password."),
        ({"mail_to": "a@b", "smtp": "h", "smtp_security": "none", "smtp_user": "x"}, "--smtp-security=none"),
        ({"smtp": "h"}, "--smtp=h: requires --mail-to."),
        ({"webhook_file": "/no/such"}, "--webhook-file=/no/such: cannot be read (No such file"),
        ({"webhook_file": "/dev/null"}, "--webhook-file=/dev/null: cannot be read (is not a regular file)."),
        ({"alert_file": "/no/such/file"}, "--alert-file=/no/such/file: the parent folder does not exist."),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_options(options, line):
    with pytest.raises(ConfigError) as error:
        channels_of({"mail_from": "me@b.org", **options}, {})
    assert any(problem.startswith(line) for problem in error.value.problems)


def test_an_address_that_is_none_is_not_printed():
    with pytest.raises(ConfigError, match=r"^WATCH_WEBHOOK=\*\*\*: must be a webhook URL\. Fix: ") as error:
        channels_of({}, {"WATCH_WEBHOOK": f"htp:/{SECRET}"})
    assert SECRET not in str(error.value)
