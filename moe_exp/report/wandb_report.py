"""Writes a wandb report comparing dense and MoE runs, using wandb's report API (package wandb-workspaces).

Curves come from wandb and stay up to date; the table shows metrics.jsonl at the time of writing.
wandb handles API keys: this module never prints or stores them.
"""

import os
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import ConfigError, problem, raise_for
from moe_exp.report.follower import Follower, number_text
from moe_exp.runs.run_folder import RunFolder

# x axes of the loss panels: end of the metric's name, suffix of the panel's title, axis label.
_AXES = (
    ("consumed_tokens", "by tokens", "tokens"),
    ("consumed_flops", "by FLOPs", "model FLOPs"),
    ("training_seconds", "by time", "seconds of training"),
)
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
_LONGEST_TITLE = 128  # limit of wandb's report model
_LOGIN = "run `wandb login`, or set WANDB_API_KEY"


@dataclass(frozen=True)
class MirroredRun:
    """A run in wandb. `wandb_id`: the run's ID in wandb; `kind`: `dense`, or the run's MOE_TYPE."""

    wandb_id: str
    kind: str
    follower: Follower

    @property
    def is_moe(self) -> bool:
        return self.kind != "dense"


def wandb_report(
    paths: Sequence[Path], *, project: str, entity: str | None = None, title: str = "Dense against MoE"
) -> str:
    """Creates a wandb report on the runs in `paths`; returns the URL of the report.

    Args:
        project: wandb project of the runs and the report.
        entity: user or team that owns the project (None: the default entity of the API key).
        title: at most 128 characters.

    Raises:
        ConfigError: a run is not in wandb, a package or key is missing, or wandb rejects the report.
    """
    runs = mirrored_runs(paths, project=project)
    _report_api()
    import wandb

    # Checked first, so that a missing key is reported with its fix.
    try:
        has_key = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:  # an invalid key, or unreadable key storage
        reason = " ".join(str(error).split())
        if key := os.environ.get("WANDB_API_KEY", "").strip():
            # wandb's message may quote the key
            reason = reason.replace(key, "the key")
        rule, fix = f"wandb rejected the key ({reason})", f"{_LOGIN} to the complete key"
        raise ConfigError([problem("wandb_api_key", "...", rule, fix)]) from None
    if not has_key:
        raise ConfigError([problem("wandb_api_key", "", "wandb has no key", _LOGIN)])
    try:
        owner = entity or wandb.Api().default_entity
        if not owner:
            raise ConfigError([problem("entity", "", "wandb knows no default user or team", "set --entity")])
        return str(build_report(runs, project=project, entity=owner, title=title).save().url)
    except ConfigError:
        raise
    # wandb's errors for a rejected request or unreachable server have no common base class
    except Exception as error:
        rule = f"wandb rejected the report ({' '.join(str(error).split())})"
        fix = "check that the key has write access and that WANDB_BASE_URL is the right server"
        raise ConfigError([problem("project", project, rule, fix)]) from error


def mirrored_runs(paths: Sequence[Path], *, project: str) -> list[MirroredRun]:
    """Reads each run once, even if `paths` repeats it; raises ConfigError if a run is not in `project`."""
    folders = [RunFolder(path.parent if path.name == "metrics.jsonl" else path) for path in paths]
    problems = [] if folders else [problem("run", "", "at least one is required", "specify run folders")]
    for folder in folders:
        path = shlex.quote(str(folder.path))
        was_in = str(Follower(folder.path).settings().get("wandb_project") or project)
        unsent = sum(not any(run.glob("*.wandb.synced")) for run in folder.wandb.glob("offline-run-*"))
        # only the first problem, because the others follow from it
        if not folder.metrics.exists():
            rule, fix = "must be a run folder with a metrics.jsonl", "give a run folder, such as runs/NAME"
        elif not _wandb_id(folder):
            rule = "has no wandb run: WANDB_PROJECT was not set"
            fix = f"set WANDB_PROJECT={project} for the next run (WANDB_MODE=offline needs no network)"
            fix += ", or use `moe-exp report`"
        elif unsent:
            were = "was" if unsent == 1 else "were"
            rule = f"is not completely in wandb: {unsent} of its starts {were} offline"
            fix = f"wandb sync -p {shlex.quote(project)} {path}/wandb/offline-run-*"
        elif was_in != project and any(folder.wandb.glob("run-*")):
            rule = f"is in the wandb project {was_in}, not in {project}"
            fix = f"give --project {shlex.quote(was_in)}"
        else:
            continue
        problems.append(problem("run", folder.path, rule, fix))
    raise_for(problems)
    runs = []
    for folder in {folder.path.resolve(): folder for folder in folders}.values():
        follower = Follower(folder.path)
        follower.refresh()
        if follower.trouble:
            rule, fix = "its metrics.jsonl cannot be read", "change its permissions, or check the disk"
            raise ConfigError([problem("run", folder.path, f"{rule} ({follower.trouble})", fix)])
        settings = follower.settings()
        # Without settings, the records show whether there are experts.
        is_moe = settings.get("use_moe", bool(follower.watched.train.get("experts")))
        kind = str(settings.get("moe_type", "moe")) if is_moe else "dense"
        runs.append(MirroredRun(_wandb_id(folder), kind, follower))
    return runs


def _wandb_id(folder: RunFolder) -> str:
    try:
        return (folder.wandb / "run_id").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


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


def build_report(runs: Sequence[MirroredRun], *, project: str, entity: str, title: str) -> Any:
    """Builds a wandb_workspaces.reports.v2.Report without sending it; see `wandb_report`."""
    if len(title) > _LONGEST_TITLE:
        rule, fix = f"must have at most {_LONGEST_TITLE} characters, not {len(title)}", "shorten it"
        raise ConfigError([problem("title", f"{title[:20]}...", rule, fix)])
    wr = _report_api()

    def by_tokens(title: str, **y: Any) -> Any:
        return wr.LinePlot(title=title, x="train/consumed_tokens", title_x="tokens", **y)

    loss = []
    for kind, text in (("train", "training loss"), ("valid", "validation loss")):
        smooth = {"smoothing_type": "exponentialTimeWeighted", "smoothing_factor": 0.6}
        options = smooth | {"smoothing_show_original": True} if kind == "train" else {}
        for axis, by, label in _AXES:
            curve = {"x": f"{kind}/{axis}", "y": [f"{kind}/lm_loss"], "title_x": label}
            loss.append(wr.LinePlot(title=f"{text} {by}", **curve, **options))
    memory = by_tokens("peak memory per rank (maximum), bytes", y=["perf/peak_memory_bytes"])
    bars = wr.BarPlot(title="peak memory at the end, bytes", metrics=["perf/peak_memory_bytes"])
    health = [by_tokens(text, y=[name], log_y=name == "train/grad_norm") for name, text in _HEALTH]
    # One curve for each layer of each run.
    load = [by_tokens(f"{text}, each layer", metric_regex=rf"moe/layer_\d+/{key}") for key, text in _EXPERTS]
    blocks = [
        wr.TableOfContents(),
        wr.H1("Runs"), wr.MarkdownBlock(text=_table(runs)),
        wr.H1("Loss"), _grid(wr, runs, loss, columns=3),
        wr.H1("Throughput"), _grid(wr, runs, [by_tokens(text, y=[name]) for name, text in _SPEED], columns=3),
        wr.H1("Memory"), _grid(wr, runs, [memory, bars], columns=2),
        wr.H1("Gradients and learning rate"), _grid(wr, runs, health, columns=2),
    ]  # fmt: skip
    if moe := [run for run in runs if run.is_moe]:
        blocks[5:5] = [wr.H1("Expert load"), _grid(wr, moe, load, columns=2)]
    what = f"{len(runs) - len(moe)} dense and {len(moe)} MoE runs"
    about = {"title": title, "description": f"{what} compared by tokens, FLOPs and time."}
    # Run sets without a project use the report's.
    return wr.Report(project=project, entity=entity, blocks=blocks, width="fluid", **about)


def _grid(wr: Any, runs: Sequence[MirroredRun], panels: Sequence[Any], *, columns: int) -> Any:
    """Grid of panels; dense and MoE runs are separate run sets, which readers can show or hide."""
    from wandb_workspaces import expr

    width = _MOST_COLUMNS // columns
    for index, panel in enumerate(panels):
        x, y = index % columns * width, index // columns * _PANEL_LINES
        panel.layout = wr.Layout(x=x, y=y, w=width, h=_PANEL_LINES)
    # a color for each run, from separate palettes for dense and MoE runs
    sets, colors = [], dict[str, str]()
    for is_moe, name in ((False, "dense"), (True, "MoE")):
        ids = [run.wandb_id for run in runs if run.is_moe == is_moe]
        colors |= {one: _COLORS[is_moe][index % len(_COLORS[is_moe])] for index, one in enumerate(ids)}
        if ids:
            sets.append(wr.Runset(name=name, filters=expr.And(expr.Metric("ID").isin(ids))))
    return wr.PanelGrid(runsets=sets, panels=list(panels), custom_run_colors=colors)


def _table(runs: Sequence[MirroredRun]) -> str:
    rows = [["run", "kind", "iteration", "tokens", "loss", "validation loss", "tokens/s", "peak memory"]]
    for run in runs:
        watched = run.follower.watched
        train = watched.train
        cells = [
            number_text(train.get("consumed_tokens"), ",.0f"), number_text(train.get("lm_loss"), ".4f"),
            number_text(watched.valid.get("lm_loss"), ".4f"),
            number_text(train.get("tokens_per_second"), ",.0f"),
            number_text(train.get("peak_memory_bytes"), ",.2f", 1e-9) + " GB",
        ]  # fmt: skip
        rows.append([_markdown(run.follower.name), _markdown(run.kind), f"{watched.iteration:,}", *cells])
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _markdown(text: str) -> str:
    """Escapes markup, HTML and cell separators."""
    return re.sub(r"[\\`*_{}\[\]()<>#+!|&~$\r\n]", lambda found: f"&#{ord(found[0])};", text)
