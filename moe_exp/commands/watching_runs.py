"""`moe-exp watch run`: whether runs are alive, and messages when they are not."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# The library is imported by the commands that use it: `moe-exp --help` answers at once.


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds them to `moe-exp watch`."""
    _add_run(commands)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="look after runs, from cron or as a daemon, and send messages about what is wrong",
        description="Looks whether a job of each run is running or waiting, whether it moves, when it will end, when its disk is full, and "
        "what has happened. Exit code 0: all is well, 1: problems, 2: the command cannot be right.",
        allow_abbrev=False,
    )
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="folder of a run")
    parser.add_argument(
        "--slurm-name", action="append", default=[], metavar="NAME", help="--job-name of its jobs; once per RUN_DIR, in their order"
    )
    parser.add_argument("--slurm-user", default="", metavar="NAME", help="whose jobs (default: yours)")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--once", action="store_true", help="look once, as from cron (default)")
    when.add_argument("--every", type=float, metavar="SECONDS", help="go on looking, as a daemon")
    when.add_argument("--test-alert", action="store_true", help="send a test by every channel, and look at nothing")
    parser.add_argument("--quiet", action="store_true", help="print nothing about runs that are well")
    parser.add_argument("--again", default="6h", metavar="TIME", help="before a problem that goes on is told again (default: 6h)")
    parser.add_argument("--stuck", default="", metavar="TIME", help="silence that counts as stuck (default: by the run's own pace)")
    parser.add_argument(
        "--ahead", default="24h", metavar="TIME", help="tell so long before that a chain of jobs is too short (default: 24h)"
    )
    parser.add_argument("--wait", default="24h", metavar="TIME", help="without a running job, though some wait, that counts (default: 24h)")
    parser.add_argument("--state", type=Path, metavar="FOLDER", help="what is remembered (default: ~/.local/state/moe-exp/watch)")
    _add_channels(parser)
    parser.set_defaults(run=_run)


def _add_channels(parser: argparse.ArgumentParser) -> None:
    channels = parser.add_argument_group("channels; passwords and addresses of webhooks are taken from files and variables alone")
    channels.add_argument("--mail-to", metavar="ADDRESSES", help="by e-mail, to these")
    channels.add_argument("--mail-from", metavar="ADDRESS", help="sender (default: moe-exp@HOST)")
    channels.add_argument("--smtp", metavar="HOST:PORT", help="server (default: localhost)")
    channels.add_argument("--smtp-security", choices=("starttls", "tls", "none"), default="starttls", help="default: starttls")
    channels.add_argument("--smtp-user", metavar="NAME", help="for a login; the password is in SMTP_PASSWORD or in a file")
    channels.add_argument("--smtp-password-file", metavar="FILE", help="its first line is the password")
    channels.add_argument("--webhook-file", metavar="FILE", help="its first line is the address of a webhook (default: of WATCH_WEBHOOK)")
    channels.add_argument("--alert-file", metavar="FILE", help="add messages to this file")


def _run(arguments: argparse.Namespace) -> int:
    from moe_exp.config import ConfigError
    from moe_exp.host.exit_codes import BAD_INPUT
    from moe_exp.watch.watchdog.settings import watchdog_of
    from moe_exp.watch.watchdog.watchdog import print_looks, watch_forever

    try:
        watchdog = watchdog_of(vars(arguments), os.environ)
    except ConfigError as error:
        print(*(f"moe-exp watch: {line}" for line in error.problems), sep="\n", file=sys.stderr)
        return BAD_INPUT
    if arguments.test_alert:
        failed = watchdog.test_channels()
        for channel in watchdog.channels:
            print(f"{channel.name}: {failed.get(channel.name, 'sent')}")
        return int(bool(failed))
    if arguments.every:
        watch_forever(watchdog, arguments.every, quiet=arguments.quiet)
    looks = watchdog.look()
    print_looks(looks, quiet=arguments.quiet)
    return int(not all(look.is_well for look in looks))
