"""A wandb report on runs, dense against MoE, through wandb's report API (package wandb-workspaces).

Curves come from wandb and stay up to date; the table and heatmaps come from metrics.jsonl at the time of
writing. Keys are left to wandb: nothing here reads, prints or stores one.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import ConfigError, problem
from moe_exp.report.follower import Follower, number
from moe_exp.report.load_squares import LoadSquares
from moe_exp.runs.run_folder import RunFolder

# Axes of every loss panel: end of the metric's name, title of the panel, label of the axis.
_AXES = (
    ("consumed_tokens", "by tokens", "tokens"),
    ("consumed_flops", "by FLOPs", "model FLOPs"),
    ("training_seconds", "by time", "seconds of training"),
)
_LOSSES = (("train", "lm_loss", "training loss"), ("valid", "lm_loss", "validation loss"))
_EXPERTS = (
    ("max_over_mean", "busiest expert over the mean"),
    ("dead_fraction", "share of dead experts"),
    ("dropped_fraction", "share of dropped slots"),
    ("router_entropy", "router entropy, nats"),
)
_SPEED = (
    ("perf/tokens_per_second", "tokens per second"),
    ("perf/tflops_per_gpu", "model TFLOP/s per rank"),
    ("perf/elapsed_time_per_iteration_ms", "milliseconds per iteration"),
)
_HEALTH = (("train/grad_norm", "grad norm"), ("train/learning_rate", "learning rate"))
# is_moe -> colors
_COLORS = {
    False: ("#1f5f9e", "#4f9bd9", "#7a5fb5", "#2a9d8f"),
    True: ("#d9541e", "#e9a03b", "#b5336b", "#8c6d1f"),
}
_MOST_COLUMNS, _PANEL_LINES = 24, 8  # of wandb's grid
_LONGEST_TITLE = 128  # of wandb's own model of a report


@dataclass(frozen=True)
class MirroredRun:
    """A run folder whose metrics are also in wandb.

    Args:
        wandb_id: id of its wandb run, unique in its project.
        kind: dense, or its MOE_TYPE.
        follower: has read its metrics.jsonl.
        squares: its load over time, for the heatmap.
    """

    folder: RunFolder
    wandb_id: str
    project: str
    kind: str
    follower: Follower
    squares: LoadSquares

    @property
    def name(self) -> str:
        return self.follower.name

    @property
    def is_moe(self) -> bool:
        return self.kind != "dense"


def wandb_report(
    paths: Sequence[Path], *, project: str, entity: str | None = None, title: str = "Dense against MoE"
) -> str:
    """Writes a new report of run folders into a wandb project; returns its URL.

    Args:
        project: wandb project of the runs and of the report.
        entity: user or team that owns it; by default that of the key.
        title: at most 128 characters.

    Raises:
        ConfigError: a run is not in wandb, a package or the key is missing, or wandb refuses the report.
    """
    runs = mirrored_runs(paths, project=project)
    _report_api()
    _need_key()
    import wandb

    with _errors_named(project):
        owner = entity or wandb.Api().default_entity
    if not owner:
        raise ConfigError([problem("entity", "", "the key belongs to no user or team", "give --entity")])
    report = build_report(runs, project=project, entity=owner, title=title)
    with _errors_named(project):
        return str(report.save().url)


@contextmanager
def _errors_named(project: str) -> Iterator[None]:
    try:
        yield
    # wandb's errors for a server that refuses or does not answer share no base class
    except Exception as error:
        reason, fix = (
            " ".join(str(error).split()),
            "see whether the key may write there and the server is the right one (WANDB_BASE_URL)",
        )
        raise ConfigError(
            [problem("project", project, f"wandb did not take the report ({reason})", fix)]
        ) from error


def mirrored_runs(paths: Sequence[Path], *, project: str) -> list[MirroredRun]:
    """Reads what a report needs of the runs; each metrics.jsonl once.

    Raises:
        ConfigError: a path is not a run folder, or the run is not in wandb's `project`; a line for each.
    """
    folders = [RunFolder(path.parent if path.name == "metrics.jsonl" else path) for path in paths]
    problems = [line for folder in folders for line in _problems(folder, project)]
    if not folders:
        problems.append(problem("run", "", "at least one is needed", "give run folders"))
    if problems:
        raise ConfigError(problems)
    found = {folder.path.resolve(): folder for folder in folders}.values()
    return [_read(folder) for folder in found]


def _problems(folder: RunFolder, project: str) -> list[str]:
    """Why a report cannot show a run: the first reason only, as the others follow from it."""
    path = shlex.quote(str(folder.path))
    if not folder.metrics.exists():
        return [
            problem(
                "run",
                folder.path,
                "is no run folder: it has no metrics.jsonl",
                "give a run folder, such as runs/NAME",
            )
        ]
    if not _wandb_id(folder):
        rule = "has no wandb run: WANDB_PROJECT was not set"
        fix = (
            f"set WANDB_PROJECT={project} for the next run (WANDB_MODE=offline needs no network), or use"
            " `moe-exp report`"
        )
        return [problem("run", folder.path, rule, fix)]
    was_in = str(Follower(folder.path).settings().get("wandb_project") or project)
    unsent = [
        run for run in sorted(folder.wandb.glob("offline-run-*")) if not any(run.glob("*.wandb.synced"))
    ]
    if unsent:
        rule = (
            f"wandb has not got all of it: {len(unsent)} of its starts"
            f" {'was' if len(unsent) == 1 else 'were'} offline"
        )
        return [
            problem(
                "run", folder.path, rule, f"wandb sync -p {shlex.quote(project)} {path}/wandb/offline-run-*"
            )
        ]
    was_online = any(folder.wandb.glob("run-*"))
    if was_online and was_in != project:
        rule = f"is in the wandb project {was_in}, not in {project}"
        return [problem("run", folder.path, rule, f"give --project {shlex.quote(was_in)}")]
    return []


def _wandb_id(folder: RunFolder) -> str:
    try:
        return (folder.wandb / "run_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _read(folder: RunFolder) -> MirroredRun:
    squares = LoadSquares()
    follower = Follower(folder.path, also=squares.take)
    follower.refresh()
    if follower.trouble:
        rule = f"its metrics.jsonl cannot be read ({follower.trouble})"
        raise ConfigError([problem("run", folder.path, rule, "change its permissions, or check the disk")])
    settings = follower.settings()
    # Without settings, the records show whether there are experts.
    is_moe = settings.get("use_moe", bool(follower.watched.train.get("experts")))
    kind = str(settings.get("moe_type", "moe")) if is_moe else "dense"
    return MirroredRun(
        folder, _wandb_id(folder), str(settings.get("wandb_project", "")), kind, follower, squares
    )


def _report_api() -> Any:
    """The module wandb_workspaces.reports.v2."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its models use pydantic 1 style
            import wandb_workspaces.reports.v2 as api
    except ImportError as error:
        package = "wandb" if (error.name or "").partition(".")[0] == "wandb" else "wandb-workspaces"
        fix = f"pip install 'moe-exp[wandb]', or pip install {package}"
        raise ConfigError([problem("package", package, "is not installed", fix)]) from None
    return api


def _need_key() -> None:
    import wandb

    try:
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:  # an invalid key, or unreadable key storage
        reason = " ".join(str(error).split())
        if key := os.environ.get("WANDB_API_KEY", "").strip():
            reason = reason.replace(key, "the key")
        fix = "run `wandb login`, or set WANDB_API_KEY to the whole key"
        raise ConfigError(
            [problem("wandb_api_key", "...", f"wandb does not take the key ({reason})", fix)]
        ) from None
    if not has_key:
        raise ConfigError(
            [problem("wandb_api_key", "", "wandb has no key", "run `wandb login`, or set WANDB_API_KEY")]
        )


def build_report(
    runs: Sequence[MirroredRun], *, project: str, entity: str, title: str = "Dense against MoE"
) -> Any:
    """The report (wandb_workspaces.reports.v2.Report), without sending it; arguments as in `wandb_report`.

    Raises:
        ConfigError: the package is missing, or the title is too long.
    """
    if len(title) > _LONGEST_TITLE:
        raise ConfigError(
            [
                problem(
                    "title",
                    f"{title[:20]}...",
                    f"has {len(title)} characters",
                    f"give at most {_LONGEST_TITLE}",
                )
            ]
        )
    wr = _report_api()
    loss = [_loss_panel(wr, *which) for which in _loss_panels()]
    speed = [_line(wr, text, "train/consumed_tokens", name, "tokens") for name, text in _SPEED]
    memory = _line(
        wr,
        "peak memory of the fullest rank, bytes",
        "train/consumed_tokens",
        "perf/peak_memory_bytes",
        "tokens",
    )
    bars = wr.BarPlot(title="peak memory at the end, bytes", metrics=["perf/peak_memory_bytes"])
    health = [
        _line(wr, text, "train/consumed_tokens", name, "tokens", log_y=name == "train/grad_norm")
        for name, text in _HEALTH
    ]
    blocks = [
        wr.TableOfContents(),
        wr.H1("Runs"), wr.MarkdownBlock(text=_table(runs)),
        wr.H1("Loss"), _grid(wr, runs, loss, columns=3),
        wr.H1("Throughput"), _grid(wr, runs, speed, columns=3),
        wr.H1("Memory"), _grid(wr, runs, [memory, bars], columns=2),
        wr.H1("Gradients and learning rate"), _grid(wr, runs, health, columns=2),
    ]  # fmt: skip
    if moe := [run for run in runs if run.is_moe]:
        blocks[5:5] = [
            wr.H1("Load of the experts"),
            *_squares(wr, moe),
            _grid(wr, moe, _expert_panels(wr), columns=2),
        ]
    # Run sets without a project use the report's.
    return wr.Report(
        project=project,
        entity=entity,
        title=title,
        description=_description(runs),
        blocks=blocks,
        width="fluid",
    )


def _description(runs: Sequence[MirroredRun]) -> str:
    num_moe = sum(run.is_moe for run in runs)
    return (
        f"{len(runs) - num_moe} dense and {num_moe} MoE runs: the same tokens, the same FLOPs, the same time."
    )


def _loss_panels() -> list[tuple[str, str, str, str, str, str]]:
    return [(kind, key, text, *axis) for kind, key, text in _LOSSES for axis in _AXES]


def _loss_panel(wr: Any, kind: str, key: str, text: str, axis: str, by: str, label: str) -> Any:
    smooth = {
        "smoothing_type": "exponentialTimeWeighted",
        "smoothing_factor": 0.6,
        "smoothing_show_original": True,
    }
    return _line(
        wr, f"{text} {by}", f"{kind}/{axis}", f"{kind}/{key}", label, **(smooth if kind == "train" else {})
    )


def _line(wr: Any, title: str, x: str, y: str, label: str, **options: Any) -> Any:
    return wr.LinePlot(title=title, x=x, y=[y], title_x=label, **options)


def _expert_panels(wr: Any) -> list[Any]:
    # One line for every layer of every run.
    return [
        wr.LinePlot(
            title=f"{text}, each layer",
            x="train/consumed_tokens",
            metric_regex=rf"moe/layer_\d+/{key}",
            title_x="tokens",
        )
        for key, text in _EXPERTS
    ]


def _grid(wr: Any, runs: Sequence[MirroredRun], panels: Sequence[Any], *, columns: int) -> Any:
    """Panels side by side, with switchable sets of dense and of MoE runs."""
    from wandb_workspaces import expr

    width = _MOST_COLUMNS // columns
    for index, panel in enumerate(panels):
        panel.layout = wr.Layout(
            x=index % columns * width, y=index // columns * _PANEL_LINES, w=width, h=_PANEL_LINES
        )
    sets, colors = [], dict[str, str]()
    for is_moe, name in ((False, "dense"), (True, "MoE")):
        ids = [run.wandb_id for run in runs if run.is_moe == is_moe]
        colors |= {one: _COLORS[is_moe][index % len(_COLORS[is_moe])] for index, one in enumerate(ids)}
        if ids:
            sets.append(wr.Runset(name=name, filters=expr.And(expr.Metric("ID").isin(ids))))
    return wr.PanelGrid(runsets=sets, panels=list(panels), custom_run_colors=colors)


def _squares(wr: Any, runs: Sequence[MirroredRun]) -> list[Any]:
    blocks = []
    for run in runs:
        if text := run.squares.text():
            blocks += [wr.H3(run.name), wr.MarkdownBlock(text=f"```\n{text}\n```")]
    return blocks


def _table(runs: Sequence[MirroredRun]) -> str:
    rows = [["run", "kind", "iteration", "tokens", "loss", "validation loss", "tokens/s", "peak memory"]]
    for run in runs:
        train, valid = run.follower.watched.train, run.follower.watched.valid
        memory = _cell(train.get("peak_memory_bytes"), ",.2f", 1e-9)
        numbers = [
            (train.get("consumed_tokens"), ",.0f"),
            (train.get("lm_loss"), ".4f"),
            (valid.get("lm_loss"), ".4f"),
        ]
        cells = [_cell(value, form) for value, form in [*numbers, (train.get("tokens_per_second"), ",.0f")]]
        rows.append(
            [
                _markdown(run.name),
                _markdown(run.kind),
                f"{run.follower.watched.iteration:,}",
                *cells,
                f"{memory} GB",
            ]
        )
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(value: Any, form: str, factor: float = 1.0) -> str:
    known = number(value)
    return "-" if known is None else format(known * factor, form)


def _markdown(text: str) -> str:
    """Escapes markup, HTML and cell separators."""
    return "".join(
        f"&#{ord(character)};" if character in "\\`*_{}[]()<>#+!|&~$\r\n" else character for character in text
    )
