"""README.md and docs/README.md: their tables of commands, and those that answer in seconds."""

import re

import pytest

from helpers import ROOT
from helpers.answered import answer
from helpers.docs.commands import commands, commands_of_line, inline_commands, moe_exp_arguments, problem_of

README = ROOT / "README.md"
TABLES = {
    page: (ROOT / page)
    .read_text(encoding="utf-8")
    .split("| I want to | command | page |")[1]
    .split("\n## ")[0]
    for page in ("README.md", "docs/README.md")
}
# Commands that answer in seconds and start nothing.
QUICK = [
    command
    for command in [*commands(README), *inline_commands(README)]
    if "--dry-run" in command.words or command.words[:2] == ("moe-exp", "plan")
]


@pytest.mark.parametrize("page", TABLES)
def test_the_table_has_whole_commands(page):
    """Each can be typed as it stands: no placeholder for flags, nothing that the command still asks for."""
    rows = [line.split("|")[1:-1] for line in TABLES[page].splitlines() if re.match(r"\| [^-]", line)]
    assert len(rows) >= 10 and all(len(row) == 3 and "](" in row[2] for row in rows)
    for _, cell, _ in rows:
        if cell.strip():
            (command,) = commands_of_line(cell.strip(" `"), page)
            assert problem_of(moe_exp_arguments(command)) == "", cell


@pytest.mark.parametrize("command", QUICK, ids=lambda command: " ".join(command.words)[:60])
def test_quick_commands_run(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISK_CHECK", "none")
    for assignment in command.variables:
        monkeypatch.setenv(*assignment.split("=", 1))
    answered = answer(moe_exp_arguments(command), codes=(0,))
    assert not answered.failure
    assert answered.out and not list(tmp_path.iterdir())
