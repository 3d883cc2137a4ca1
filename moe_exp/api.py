"""The Python interface: `moe_exp.train`, `load_run`, `load_model` and `plan`. No torch until it is needed."""

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
    from moe_exp.planner.run_plan import RunPlan


class Run:
    """A run folder. Each file is read at its first use; call `load_run` again for what a run has added since.

    Attributes:
        path: of the folder.
        config: settings of the latest start.
        summary: how the run ended, see docs/run_folder.md; empty until then.
        records: all records of metrics.jsonl, in order.
        train, valid, events: the records of each kind as a DataFrame, a column per field. Values that are
            null are NaN or None.
        experts: the load of the experts as a DataFrame, a row per layer of each train record.
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
        """As they are in the file; empty without one."""
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
        """Draws losses, throughput and the balance of the experts, together with those of `others`.

        Runs that differ only in SEED are a line, their mean, in a band from the lowest to the highest. Lines
        are named by the settings in which they differ, else by their folders.

        Args:
            others: runs to draw over this one.
            x: iteration, consumed_tokens, consumed_flops or training_seconds.

        Returns:
            A figure, which a notebook shows; `figure.savefig("curves.png")` writes it.
        """
        _package("matplotlib", extra="analysis")
        from moe_exp.runs.curves import draw_runs

        named = _named([self, *others])
        return draw_runs({name: [run.records for run in runs] for name, runs in named.items()}, x)

    def _of_kind(self, kind: str) -> list[Record]:
        return [record for record in self.records if record.get("kind") == kind]


def train(*, resume: str | os.PathLike[str] | None = None, **settings: Any) -> Run:
    """Trains a model, or resumes its run, as `moe-exp train` does, and returns the run.

    In a process group, or under torchrun, this process trains as one of the ranks, so call it on every rank.
    Otherwise it launches the ranks on this machine and waits for them.

    Args:
        resume: run folder to continue with its own settings.
        settings: by the names of docs/settings.md in lower case, such as `num_experts=16`, or `config`, the
            path of a settings file. They come before variables of the environment; None counts as not given.

    Returns:
        The run; `summary["status"]` is finished, or stopped if a signal or a setting ended it early.

    Raises:
        ValueError: settings cannot run, or what they name cannot be used; one line for each.
        RuntimeError: the run has failed; with the reason.
        ModuleNotFoundError: torch is missing.
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
    # the folder is known before the launch, also if it fails
    run = Run(RunFolder.of(load_config(folder)).path)
    # the ranks are other processes: they leave the lines of their errors in a file
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
        raise ConfigError(reasons or [f"{run.path}: the settings cannot run, see the output"])
    if code not in (FINISHED, TO_BE_CONTINUED):
        why = "; ".join(reasons) or "see the output"
        raise RuntimeError(f"{run.path}: the run has failed with exit code {code}: {why}")
    return run


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in the folder `path`, RUN_DIR/RUN_NAME.

    Raises:
        ValueError: `path` is no run folder.
    """
    from moe_exp.report.run_data import run_problems

    run = Run(path)
    if problems := run_problems([run.path]):
        raise ConfigError(problems)
    return run


def load_model(path: str | os.PathLike[str], *, dtype: str = "", tokenizer: str = "") -> Model:
    """Loads a trained model into this process, for `generate` and `score`: see `moe_exp.inference.model`.

    Args:
        path: run folder, checkpoints folder or an iter_ folder.
        dtype: compute type, fp32, bf16 or fp16; empty: the training's.
        tokenizer: file or folder of the tokenizer; empty: the training's.

    Raises:
        ValueError: there is no checkpoint, or it cannot be used.
        ModuleNotFoundError: torch is missing.
    """
    _package("torch", extra="train")
    from moe_exp.inference.model import Model

    return Model(path, dtype=dtype, tokenizer=tokenizer)


def plan(
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    tokens: float | str | None = None,
    price: float | None = None,
    profile: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> RunPlan:
    """Predicts memory, time and cost of a run, as `moe-exp plan` does. Needs no torch.

    Args:
        gpu: kind of device, see `moe-exp plan hardware`; default A100-80GB.
        gpus: devices in all, instead of the setting `nnodes`.
        tokens: budget, a number or text such as "300B", instead of the setting `train_iters`.
        price: of a GPU-hour, in any currency.
        profile: file with constants that `moe-exp plan calibrate` wrote.
        settings: as for `train`.

    Raises:
        ValueError: a value is wrong; one line for each.
    """
    from moe_exp.data.tokens.manifests import with_vocab_size
    from moe_exp.planner.hardware import DEFAULT_GPU, load_hardware
    from moe_exp.planner.prediction import CONSTANTS, load_constants
    from moe_exp.planner.run_plan import plan_run, settings_for
    from moe_exp.planner.search.layout_text import parse_budget

    hardware, constants = load_hardware(gpu or DEFAULT_GPU), load_constants(Path(profile or CONSTANTS))
    budget = parse_budget(*(None if value is None else str(value) for value in (tokens, price)))
    flags = settings_for(hardware, with_file(_flags(settings), os.environ), gpus)
    config, _ = with_vocab_size(load_config(flags, nodes=hardware.nodes), given_values(flags, os.environ))
    return plan_run(config, hardware, constants, **budget)


def _flags(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings as `moe-exp train` reads them from the command line; None counts as not given."""
    given = {name: value for name, value in settings.items() if value is not None}
    return {name: str(one).lower() if isinstance(one, bool) else str(one) for name, one in given.items()}


def _named(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs to draw as one line each, several if they differ in SEED alone, by a name for each line."""
    from moe_exp.runs.curves import grouped_by_seed, names_by_difference

    settings = [run._settings for run in runs]
    groups = []
    for group in grouped_by_seed(settings):
        # runs with the same seed are not a sample over seeds: one line each
        has_seeds = len({str(settings[index].get("seed")) for index in group}) == len(group)
        groups += [group] if has_seeds else [[index] for index in group]
    first = [runs[group[0]] for group in groups]
    names = [run.name for run in first]
    paths = names if len(set(names)) == len(names) else [str(run.path) for run in first]
    labels = names_by_difference([settings[group[0]] for group in groups], paths)
    return {label: [runs[index] for index in group] for label, group in zip(labels, groups, strict=True)}


def _frame(records: Sequence[Record], keys: Iterable[str]) -> pandas.DataFrame:
    """A row per record. Columns are `keys`, then what only some records have; those of numbers are float or
    int, also where all values are null or too large for int64.
    """
    pandas = _package("pandas", extra="analysis")
    # known columns first and always, so that a frame of a young run has them, too
    names = dict.fromkeys([*keys, *(key for record in records for key in record)])
    frame = pandas.DataFrame(list(records), columns=[name for name in names if name != "kind"])
    for name in frame:
        are_numbers = all(value is None or type(value) in (int, float) for value in frame[name])
        if frame[name].dtype == object and are_numbers:
            frame[name] = frame[name].astype(float)
    return frame


def _package(name: str, *, extra: str) -> Any:
    """Imports a package; a ModuleNotFoundError names the `extra` of moe_exp that installs it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        from moe_exp.commands.doctor import install_command

        fix = f"{install_command(extra)}, or activate the environment that has it"
        raise ModuleNotFoundError(f"{name} is not installed. Fix: {fix}.", name=name) from None
