"""The Python API: `moe_exp.train`, `load_run`, `load_model` and `plan`. Imports torch only when needed."""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.loading import explain, given_values, known_settings, recorded_settings, with_file
from moe_exp.host.exit_codes import BAD_INPUT, FINISHED, REASONS_FILE, TO_BE_CONTINUED
from moe_exp.host.files import expanded, read_json
from moe_exp.runs.records import EXPERT_KEYS, TRAIN_KEYS, VALID_KEYS, Record, read_metrics
from moe_exp.runs.run_folder import RunFolder

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from moe_exp.inference.model import Model
    from moe_exp.planner.tables import RunPlan


class Run:
    """A run folder. Each file is read once, when first used; call `load_run` again to read newer data.

    Attributes:
        path: path of the folder.
        config: settings with which the run was last started.
        summary: outcome of the run (docs/run_folder.md); empty until the run ends.
        records: all records of metrics.jsonl, in order.
        train, valid, events: DataFrame of the records of that kind, with a column per field. Null values are
            NaN or None.
        experts: DataFrame of expert loads, with a row for each layer in each train record.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = expanded(path)
        self._folder = RunFolder(self.path)

    def __repr__(self) -> str:
        status = self.summary.get("status", "has no summary yet")
        return f"<Run {self.path}: {status}, {len(self.records)} records>"

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def config(self) -> Config:
        try:
            return Config(**known_settings(recorded_settings(self._folder.config)))
        except ValidationError as error:
            raise ConfigError([f"{self._folder.config}: {line}" for line in explain(error)]) from None

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Settings recorded in config.yaml; empty if the file does not exist."""
        return recorded_settings(self._folder.config) if self._folder.config.exists() else {}

    @cached_property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = read_json(self._folder.summary) if self._folder.summary.exists() else {}
        return found

    @cached_property
    def records(self) -> list[Record]:
        return read_metrics(self._folder.metrics) if self._folder.metrics.exists() else []

    @cached_property
    def train(self) -> pandas.DataFrame:
        return _frame(self._of_kind("train"), TRAIN_KEYS)

    @cached_property
    def valid(self) -> pandas.DataFrame:
        return _frame(self._of_kind("valid"), VALID_KEYS)

    @cached_property
    def events(self) -> pandas.DataFrame:
        return _frame(self._of_kind("event"), ("event", "iteration", "time"))

    @cached_property
    def experts(self) -> pandas.DataFrame:
        layers = []
        for record in self._of_kind("train"):
            layers += [{"iteration": record["iteration"]} | layer for layer in record.get("experts") or []]
        return _frame(layers, ["iteration", *EXPERT_KEYS])

    def plot(self, *others: Run, x: str = "iteration") -> Figure:
        """Plots loss, throughput and expert balance of this run and `others`.

        Runs that differ only in SEED are averaged into one line, with a band from the lowest to the highest
        value. Labels show the settings that differ between lines. If no settings differ, labels show the
        run folders.

        Args:
            others: further runs to plot.
            x: iteration, consumed_tokens, consumed_flops or training_seconds.

        Returns:
            A figure that notebooks display; `figure.savefig("curves.png")` saves it.
        """
        _package("matplotlib", extra="analysis")
        from moe_exp.runs.curves import draw_runs

        named = _named([self, *others])
        return draw_runs({name: [run.records for run in runs] for name, runs in named.items()}, x)

    def _of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.get("kind") == kind]


def train(*, resume: str | os.PathLike[str] | None = None, **settings: Any) -> Run:
    """Trains a model, or resumes a run, as `moe-exp train` does, and returns the run.

    In a process group or under torchrun, every rank must call `train`, which trains in the calling process.
    Otherwise, `train` launches the ranks on this machine and waits until they end.

    Args:
        resume: run folder to resume; `settings` override its settings.
        settings: settings from docs/settings.md, in lower case, such as `num_experts=16`; `config` is the
            path of a settings file. Settings override environment variables; a setting of None counts
            as not given.

    Returns:
        The run; `summary["status"]` is "finished", or "stopped" if a signal or a setting ended the run early.

    Raises:
        ValueError: if settings are invalid or refer to unusable files; the message has one line per problem.
        RuntimeError: if the run fails; the message tells why.
        ModuleNotFoundError: if torch is not installed.
    """
    _package("torch", extra="train")
    from moe_exp.engine import runtime
    from moe_exp.launch.launch import train as launch
    from moe_exp.launch.launch import with_run_folder

    flags = _flags(settings)
    folder = with_run_folder(flags, str(resume)) if resume else flags
    if runtime.is_rank():
        from moe_exp.training.loop import train_here

        return Run(train_here(folder).path)
    # resolve the folder before the launch, which may fail
    run = Run(RunFolder.of(load_config(folder)).path)
    # the ranks are other processes, so they write their errors to a file
    with tempfile.NamedTemporaryFile("r") as file:
        os.environ[REASONS_FILE] = file.name
        try:
            code = launch(flags, resume=str(resume or ""), raises=True)
        finally:
            del os.environ[REASONS_FILE]
        reasons = list(dict.fromkeys(file.read().splitlines()))
    if code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if code == BAD_INPUT:
        raise ConfigError(reasons or [f"{run.path}: invalid settings, see the output"])
    if code not in (FINISHED, TO_BE_CONTINUED):
        why = "; ".join(reasons) or "see the output"
        raise RuntimeError(f"{run.path}: the run failed with exit code {code}: {why}")
    return run


def load_run(path: str | os.PathLike[str]) -> Run:
    """Loads the run in the folder `path` (RUN_DIR/RUN_NAME).

    Raises:
        ValueError: if `path` is not a run folder.
    """
    from moe_exp.report.run_data import run_problems

    run = Run(path)
    if problems := run_problems([run.path]):
        raise ConfigError(problems)
    return run


def load_model(path: str | os.PathLike[str], *, dtype: str = "", tokenizer: str = "") -> Model:
    """Loads a trained model into this process. The model has the methods `generate` and `score`.

    Args:
        path: run folder, checkpoints folder or iter_ folder.
        dtype: compute dtype (fp32, bf16 or fp16); empty: as in training.
        tokenizer: tokenizer.json or its folder, a SentencePiece .model file, or `bytes`; empty: as in
            training.

    Raises:
        ValueError: if no usable checkpoint is found, or the process is one of several ranks.
        ModuleNotFoundError: if torch is not installed.
    """
    _package("torch", extra="train")
    from moe_exp.inference.model import Model

    return Model(path, dtype=dtype, tokenizer=tokenizer)


def plan(
    *, gpu: str | None = None, gpus: int | None = None, tokens: float | str | None = None,
    price: float | None = None, profile: str | os.PathLike[str] | None = None, **settings: Any,
) -> RunPlan:  # fmt: skip
    """Predicts memory, time and cost of a run, as `moe-exp plan` does. Works without torch.

    Args:
        gpu: device name listed by `moe-exp plan hardware` (default: A100-80GB).
        gpus: total number of devices; replaces the setting `nnodes`.
        tokens: token budget, a number or text such as "300B"; replaces the setting `train_iters`.
        price: price of a GPU-hour, in any currency.
        profile: file of constants that `moe-exp plan calibrate` wrote.
        settings: as for `train`.

    Raises:
        ValueError: if values are invalid; the message has one line per invalid value.
    """
    from moe_exp.data.tokens.manifests import with_vocab_size
    from moe_exp.planner.hardware import DEFAULT_GPU, load_hardware
    from moe_exp.planner.prediction import CONSTANTS, load_constants
    from moe_exp.planner.search.layout_text import parse_budget, settings_for
    from moe_exp.planner.tables import plan_run

    hardware, constants = load_hardware(gpu or DEFAULT_GPU), load_constants(Path(profile or CONSTANTS))
    budget = parse_budget(*(None if value is None else str(value) for value in (tokens, price)))
    flags = settings_for(hardware, with_file(_flags(settings), os.environ), gpus)
    config, _ = with_vocab_size(load_config(flags, nodes=hardware.nodes), given_values(flags, os.environ))
    return plan_run(config, hardware, constants, **budget)


def _flags(settings: Mapping[str, Any]) -> dict[str, str]:
    """Converts settings to flags of `moe-exp train`, as text; omits settings whose value is None."""
    given = {name: value for name, value in settings.items() if value is not None}
    return {name: str(one).lower() if isinstance(one, bool) else str(one) for name, one in given.items()}


def _named(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs that differ only in SEED; returns a dict from each plotted line's label to its runs."""
    from moe_exp.runs.curves import grouped_by_seed, names_by_difference

    settings = [run._settings for run in runs]
    groups = []
    for group in grouped_by_seed(settings):
        # runs with equal seeds are not a sample over seeds, so each gets its own line
        has_seeds = len({str(settings[index].get("seed")) for index in group}) == len(group)
        groups += [group] if has_seeds else [[index] for index in group]
    first = [runs[group[0]] for group in groups]
    names = [run.name for run in first]
    paths = names if len(set(names)) == len(names) else [str(run.path) for run in first]
    labels = names_by_difference([settings[group[0]] for group in groups], paths)
    return {label: [runs[index] for index in group] for label, group in zip(labels, groups, strict=True)}


def _frame(records: Sequence[Record], keys: Iterable[str]) -> pandas.DataFrame:
    """Returns a DataFrame with a row per record. Columns are `keys`, followed by the records' other fields.
    Columns of only numbers and nulls have a float or int dtype, even if all are null or some exceed int64.
    """
    pandas = _package("pandas", extra="analysis")
    # always include the known columns, which a run that just started may lack
    names = dict.fromkeys([*keys, *(key for record in records for key in record)])
    frame = pandas.DataFrame(list(records), columns=[name for name in names if name != "kind"])
    for name in frame:
        are_numbers = all(value is None or type(value) in (int, float) for value in frame[name])
        if frame[name].dtype == object and are_numbers:
            frame[name] = frame[name].astype(float)
    return frame


def _package(name: str, *, extra: str) -> Any:
    """Imports a package; if it is missing, ModuleNotFoundError names the `extra` that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        from moe_exp.commands.doctor import install_command

        fix = f"{install_command(extra)}, or activate the environment that has it"
        raise ModuleNotFoundError(f"{name} is not installed. Fix: {fix}.", name=name) from None
