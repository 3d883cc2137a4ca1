"""`moe-exp report`: what is written, where it may be written, and that nothing from a run becomes markup."""

import json
import os
import re

import pytest

from helpers.run_folders import dense_and_moe, event, train_record, write_run
from moe_exp.cli import main
from moe_exp.config.setting_types import shown
from moe_exp.host.quantities import bytes_text
from moe_exp.report.page import MOST_BYTES, embedded, report_html
from moe_exp.report.run_data import read_runs

EVIL = "<script>alert(1)</script>"


def data_of(page: str) -> dict:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def report(*arguments) -> int:
    return main(["report", *map(str, arguments)])


def test_a_page(tmp_path, capsys):
    out = tmp_path / "report.html"
    assert report(*dense_and_moe(tmp_path), "--out", out) == 0
    page = out.read_text()
    printed = capsys.readouterr()
    assert printed.out == f"wrote {bytes_text(len(page.encode()))}: open {out}\n"
    assert "warning: experts: 2 of 40 records have a loss that is not a number" in printed.err
    assert len(page) < 300_000
    assert "experts reaches the validation loss of dense (4." in page
    # one link, and nothing that is fetched
    assert not re.search(r'(src|href)="(?!https://github.com/leeoniya/uPlot"|#)', page)
    dense, experts = data_of(page)["runs"]
    assert (dense["name"], experts["name"]) == ("dense", "experts")
    curve = experts["curves"]["lm_loss"]
    assert curve["gaps"] == [10, 11] and curve["mean"][10] is None
    assert experts["spikes"]["iteration"] == [30] and experts["experts"]["layers"] == [1, 2]
    assert "checkpoint_failed" in page and "no space left" in page


def test_markdown(tmp_path, capsys):
    assert report(*dense_and_moe(tmp_path), "--format", "md") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "### dense and experts"
    assert "|  | dense | experts |" in lines and "| training time | 4 s | 12 s |" in lines
    assert lines[3].startswith("> **Note:** experts: 2 of 40")
    assert lines[5].startswith("**experts is better than dense by 1.0000 at equal tokens: ")
    assert "3.0500 against 4.0500 nats per token, after 20.48K tokens each" in lines[5]
    assert sum(line.startswith("experts reaches the validation loss of dense") for line in lines) == 1
    assert "| USE\\_MOE | false | true |" in lines


def test_folders_by_pattern_notes_and_generated_text(tmp_path, capsys):
    dense, moe = dense_and_moe(tmp_path / "runs")
    (tmp_path / "runs" / "other").mkdir()
    (moe / "notes.md").write_text(f"dropless {EVIL}\n")
    (moe / "generated.jsonl").write_text('{"prompt": "def ", "text": "main():"}\nnot a line\n{"text": 3}\n')
    times = ("2026-01-02T10:00:00+00:00", "2026-01-03T10:00:00+00:00")
    starts = [{"time": time, "host": f"n{number}"} for number, time in enumerate(times, start=1)]
    (moe / "provenance.json").write_text(json.dumps({"starts": starts}))
    (tmp_path / "about.md").write_text("The second try.\n")
    out = tmp_path / "report.html"
    assert report(tmp_path / "runs" / "*", "--notes", tmp_path / "about.md", "--out", out) == 0
    page = out.read_text()
    assert [run["name"] for run in data_of(page)["runs"]] == ["dense", "experts"]
    assert '<p class="own">The second try.</p>' in page and EVIL not in page
    assert '<p class="own">dropless &lt;script&gt;' in page and "<b>def </b>main():</p>" in page
    for text in ("2026-01-02 10:00:00", "2026-01-03 10:00:00", "n2", "moe-exp train --preset=cpu"):
        assert text in page
    assert report(dense, "--notes", "a text", "--format", "md") == 0
    assert "a text" in capsys.readouterr().out.splitlines()
    assert report(tmp_path / "none*") == 1
    assert "none*: matches no run folder. Fix: check the pattern" in capsys.readouterr().err


def test_names_and_settings_are_text(tmp_path):
    path = write_run(tmp_path / "x", [train_record(1, 5.0)], use_moe=False, tokenizer=f"{EVIL}&|{{{{css}}}}")
    other = write_run(tmp_path / "y", [train_record(1, 5.0)], use_moe=False)
    runs = read_runs([path, other])
    runs[0].name = EVIL
    page = report_html(runs, title=EVIL)
    assert EVIL not in page and page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 4
    assert "&amp;|{{css}}" in page  # a setting that looks like a place of the template stays as it is
    assert data_of(page)["runs"][0]["name"] == EVIL


def test_embedded_json_cannot_end_its_element():
    value = {"name": "</script><!-- & \u2028"}
    assert not set("<>&\u2028") & set(embedded(value)) and json.loads(embedded(value)) == value


def test_many_runs_stay_small(tmp_path):
    records = [train_record(index, 5.0, experts=[]) for index in range(1, 300)]
    runs = read_runs([write_run(tmp_path / f"run{index}", records, use_moe=False) for index in range(3)]) * 40
    assert len(report_html(runs).encode()) < MOST_BYTES


@pytest.mark.parametrize("kind", ["file", "folder", "parent", "metrics"])
def test_places_that_a_report_does_not_take(tmp_path, capsys, kind):
    dense, _ = dense_and_moe(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    places = {"file": tmp_path / "notes.txt", "folder": tmp_path, "parent": tmp_path / "no" / "a.html"}
    out = {"metrics": dense / "metrics.jsonl", **places}[kind]
    before = out.read_bytes() if out.is_file() else None
    assert report(dense, tmp_path / "nowhere", "--out", out) == 1
    error = capsys.readouterr().err
    assert f"OUT={shown(out)}: " in error and "nowhere: folder not found" in error  # both at once
    assert (out.read_bytes() if out.is_file() else None) == before


@pytest.mark.parametrize("kind", ["html", "md"])
def test_a_report_replaces_an_earlier_one_and_a_link_stays_a_link(tmp_path, kind):
    dense, moe = dense_and_moe(tmp_path)
    (tmp_path / "there").mkdir()
    link, page = tmp_path / "report", tmp_path / "there" / "page"
    link.symlink_to(page)
    for runs in ([dense], [dense, moe]):
        assert report(*runs, "--format", kind, "--out", link) == 0
    assert link.is_symlink() and "experts" in page.read_text()


def test_the_chosen_loss(tmp_path, capsys):
    assert report(dense_and_moe(tmp_path / "other")[0], "--loss", "nan") == 1
    assert "LOSS=nan: must be a finite number. Fix: " in capsys.readouterr().err
    assert report(*dense_and_moe(tmp_path), "--format", "md", "--loss", "7.01") == 0
    # Means of two records, 5% of the tokens of 40: dense goes from 7.05 to 6.95 at records 10 and 11, the
    # other from 7.0625 to 6.9375 at 8 and 9, of 0.1 and 0.3 s each: 1.04 s and 2.526 s.
    assert "| time to a loss of 7.0100 | 1.04 s | 2.53 s |" in capsys.readouterr().out


@pytest.mark.parametrize("events", [[], [event("checkpoint", 3, "10:00:10")]], ids=["none", "no start"])
def test_a_run_that_has_not_come_to_its_start_stands_beside_others(tmp_path, events):
    fresh = write_run(tmp_path / "fresh", events)
    if not events:
        (fresh / "metrics.jsonl").unlink()  # it is building its model, or died there
    out = tmp_path / "report.html"
    assert report(fresh, "--out", out) == 0
    assert "No loss has been recorded yet." in out.read_text()
    assert report(*dense_and_moe(tmp_path), fresh, "--out", out) == 0
    assert "fresh: no train records yet." in out.read_text() and out.read_text().count('class="track"') == 3


def test_the_newest_of_many_events_and_all_faults_are_kept(tmp_path):
    checkpoints = [event("checkpoint", number, "10:00:10") for number in range(1, 400)]
    records = [event("start", 0, "10:00:00"), event("checkpoint_failed", 0, "10:00:05"), *checkpoints]
    records.append(event("end", 400, "10:02:00"))
    page = report_html(read_runs([write_run(tmp_path / "x", records, use_moe=False)]))
    assert "<summary>Events: 300; not shown: 102 checkpoints of x</summary>" in page
    iterations = re.findall(r'<td class="text">checkpoint</td><td class="text">(\d+)</td>', page)
    assert iterations == [str(number) for number in range(103, 400)]
    assert page.count('<tr class="fault">') == 1 and page.count('class="mark checkpoint"') == 133
    spikes = [event("spike", number, "10:00:10") for number in range(1, 400)]
    other = write_run(tmp_path / "y", [*records[:1], *spikes, *checkpoints], use_moe=False)
    page = report_html(read_runs([other]))
    assert "not shown: 399 checkpoints and 100 others of y" in page
    assert 'title="spike at iteration 399,' in page and 'title="spike at iteration 249,' not in page


def test_bytes_that_are_no_text_are_question_marks(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"bad\xff")
    write_run(path, [train_record(1, 5.0), event("checkpoint_failed", 1, "10:00:00", reason="x\udcff")])
    out = tmp_path / "report.html"
    assert report(path, "--out", out) == report(path, "--format", "md") == 0
    page = out.read_text()
    assert "bad?" in page and "reason: x?" in page and "### bad?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            "wandb RUN --project p --format md --loss 3",
            ["FORMAT=md: has no effect for wandb", "LOSS=3.0: has no effect for wandb"],
        ),
        ("RUN --watch --out x.html", ["OUT=x.html: has no effect for --watch. Fix: omit --out."]),
        ("RUN --project p", ["PROJECT=p: has no effect for a page. Fix: omit --project."]),
    ],
)
def test_options_that_would_be_ignored_are_refused(capsys, arguments, lines):
    assert report(*arguments.split()) == 1
    error = capsys.readouterr().err
    assert all(line in error for line in lines)
