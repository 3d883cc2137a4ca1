"""Live terminal view of runs: one run in detail, or several as rows of a table."""

import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_exp.config import raise_for
from moe_exp.host.processes import signals_handled
from moe_exp.host.quantities import bytes_text, duration
from moe_exp.report.follower import Follower, WorstLayer, layers_by_load, number, number_text
from moe_exp.report.run_data import distinct_names, run_problems

_PLOT_RECORDS, _LAYERS = 500, 3
_BETWEEN = 3  # characters between columns
_NOTHING = "-"
# Bit of each dot of a Braille character, by row and column: Unicode added the last row later.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_OF_A_RUN = ("metrics.jsonl", "config.yaml", "provenance.json", ".lock", "train.log", "checkpoints")
_STYLES = {
    "finished": "green", "failed": "bold red", "stopped": "yellow", "late": "bold yellow", "waiting": "dim",
    "running": "cyan",
}  # fmt: skip


def watch(paths: Sequence[Path], *, console: Console, once: bool = False, seconds: float = 2.0) -> None:
    """Shows runs until all have ended. Waits for runs that do not exist yet. Ctrl-C raises KeyboardInterrupt.

    Args:
        paths: run folders or their metrics.jsonl; other paths raise ConfigError. Duplicates are shown once.
        once: print the state once and return; always true if `console` is not a terminal.
        seconds: polling interval.
    """
    once = once or not console.is_terminal or console.is_dumb_terminal
    problems = []
    for path in paths:
        folder = path.parent if path.name == "metrics.jsonl" else path
        inside = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
        may_come = not once and not inside and not folder.is_file()
        if not (inside & set(_OF_A_RUN) or may_come):
            problems += run_problems([folder])
    raise_for(problems)
    # by resolved path: a run named twice gets one row
    followers = list({follower.folder.path.resolve(): follower for follower in map(Follower, paths)}.values())
    names = distinct_names([follower.folder.path for follower in followers])
    for follower, name in zip(followers, names, strict=True):
        follower.name = name

    def picture() -> RenderableType:
        for follower in followers:
            follower.refresh()
        return one_run(followers[0], console) if len(followers) == 1 else many_runs(followers, console)

    if once:
        console.print(picture())
        return
    # Ctrl-C only sets an event: a KeyboardInterrupt raised inside a `__del__` would be lost.
    pressed = threading.Event()
    # Only the main thread may handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    handled = signals_handled(lambda *_: pressed.set(), signals=[signal.SIGINT] if is_main else [])
    with handled, Live(console=console, auto_refresh=False) as live:
        while not pressed.is_set():
            live.update(picture(), refresh=True)
            if all(follower.status() for follower in followers):
                return
            pressed.wait(seconds)
    raise KeyboardInterrupt


def one_run(follower: Follower, console: Console) -> RenderableType:
    """Details of one run, the most important first because the terminal may have few rows."""
    watched, settings, kind = follower.watched, follower.settings(), ""
    if "use_moe" in settings:
        kind = _printable(str(settings.get("moe_type"))) if settings["use_moe"] else "dense"
    title = Text.assemble((_printable(follower.name), "bold"), "  ", (kind, "dim"), "  ", _state(follower))
    title.no_wrap, title.overflow = True, "ellipsis"
    parts: list[RenderableType] = [title, _age_line(follower)]
    if watched.num_train:
        total = number(settings.get("train_iters"))
        cells: list[RenderableType] = [Text(f"iteration {_iterations(follower)}")]
        if total:
            cells.append(ProgressBar(total=total, completed=min(watched.iteration, total), width=30))
        if not follower.status():
            cells.append(Text(f"eta {_eta(follower)}"))
        line = Table.grid(padding=(0, 2))
        line.add_row(*cells)
        parts += [line, *_loss_plot(follower, console), _values(follower, console)]
        parts += _layer_lines(layers_by_load(watched.train))
    if watched.events:
        table = Table.grid(padding=(0, 2))
        for overflow in ("fold", "fold", "ellipsis"):
            table.add_column(no_wrap=True, overflow=overflow)
        for event in list(watched.events)[-3:]:
            known = ("kind", "iteration", "event", "time")
            details = ", ".join(f"{key} {value}" for key, value in event.items() if key not in known)
            table.add_row(
                Text(_printable(str(event.get("time", ""))[11:19]), style="dim"),
                Text(_printable(str(event.get("event"))), style="magenta"),
                Text(_printable(f"iteration {event['iteration']:,}  {details}")),
            )
        parts.append(table)
    return Group(*parts)


def many_runs(followers: Sequence[Follower], console: Console) -> RenderableType:
    """Table with one row per run and as many columns as fit."""
    rows = [_cells(follower, console) for follower in followers]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    left = console.width
    # in order of importance: a column that does not fit is skipped, but a narrower one after it may fit
    for name in rows[0]:
        width = max(len(name), *(row[name].cell_len for row in rows))
        if name == "run":
            width = min(width, max(16, console.width // 4))
        if width + _BETWEEN <= left:
            left -= width + _BETWEEN
            side: JustifyMethod = "left" if name in ("run", "state", "worst layer", "curve") else "right"
            table.add_column(name, justify=side, width=width, no_wrap=name != "run", overflow="fold")
    for row in rows:
        table.add_row(*(row[str(column.header)] for column in table.columns))
    late = (follower for follower in followers if follower.trouble or follower.is_late())
    return Group(table, *(Text.assemble(f"{_printable(one.name)}: ", _age_line(one)) for one in late))


def _cells(follower: Follower, console: Console) -> dict[str, Text]:
    """Table cells by column name, most important first."""
    watched, train = follower.watched, follower.watched.train
    losses, age = [value for _, value in watched.losses][-_PLOT_RECORDS:], follower.age_seconds()
    memory = number(train.get("peak_memory_bytes")) or number(train.get("memory_allocated_bytes"))
    loss = Text(_NOTHING)
    if watched.num_train:
        known = number(train.get("lm_loss"))
        loss = Text("not a number", "bold red") if known is None else Text(f"{known:.4f}", "bold")
    worst = Text(_NOTHING)
    if layers := layers_by_load(train):
        worst = Text(f"{layers[0].layer}: {number_text(layers[0].max_over_mean, '.2f')}x")
        worst.append(f", {layers[0].num_dead} dead", style="red" if layers[0].num_dead else "dim")
        worst.append(f", {layers[0].dropped:.1%} dropped" if layers[0].dropped else "")
    return {
        "run": Text(_printable(follower.name)),
        "state": _state(follower),
        "iteration": Text(_iterations(follower)),
        "loss": loss,
        "eta": Text(_eta(follower)),
        "tokens/s": Text(number_text(train.get("tokens_per_second"), ",.0f")),
        "worst layer": worst,
        "valid": Text(number_text(watched.valid.get("lm_loss"), ".4f")),
        "curve": Text(sparkline(losses, 16, ascii_only=console.options.ascii_only), style="blue"),
        "grad norm": Text(number_text(train.get("grad_norm"), ".3g")),
        "learning rate": Text(number_text(train.get("learning_rate"), ".3e")),
        "memory": Text(bytes_text(memory) if memory else _NOTHING),
        "last record": Text(_NOTHING if age is None else duration(age)),
    }


def _state(follower: Follower) -> Text:
    state = follower.status() or ("late" if follower.is_late() else "running")
    state = "waiting" if follower.modified is None else state
    return Text(_printable(state), style=_STYLES.get(state, ""))


def _iterations(follower: Follower) -> str:
    train_iters = number(follower.settings().get("train_iters"))
    return f"{follower.watched.iteration:,}" + (f"/{train_iters:,.0f}" if train_iters else "")


def _eta(follower: Follower) -> str:
    eta_seconds = number(follower.watched.train.get("eta_seconds"))
    if eta_seconds is None or eta_seconds > 1e10 or follower.status():  # 1e10 s: stalled
        return _NOTHING
    # Counts down since the record was written, but not while the run is late.
    passed = 0.0 if follower.is_late() else follower.age_seconds() or 0.0
    return str(timedelta(seconds=round(max(0.0, eta_seconds - passed))))


def _loss_plot(follower: Follower, console: Console) -> list[RenderableType]:
    shown = list(follower.watched.losses)[-_PLOT_RECORDS:]
    losses, width = [loss for _, loss in shown], max(10, min(console.width - 10, 100))
    known = [loss for loss in losses if loss is not None]
    if len(known) < 2:
        return []
    caption = f"loss from iteration {shown[0][0]:,} to {shown[-1][0]:,}"
    if missing := len(losses) - len(known):
        caption += f", {missing:,} not a number"
    if console.options.ascii_only:
        caption += f": {min(known):.4f} to {max(known):.4f}"
        return [Text(sparkline(losses, width, ascii_only=True)), Text(caption, style="dim")]
    height = max(3, min(8, console.height - 19))  # the other lines of the view
    lines = plot(losses, min(width, (len(losses) + 1) // 2), height)
    # Approximate, because the plot shows means of neighbors.
    pairs = zip([f"{max(known):.4g}", *[""] * (height - 2), f"{min(known):.4g}"], lines, strict=True)
    rows = [Text.assemble((f"{label:>8} ", "dim"), (line, "blue")) for label, line in pairs]
    return [*rows, Text(" " * 9 + caption, style="dim")]


def _values(follower: Follower, console: Console) -> RenderableType:
    cells, table = _cells(follower, console), Table.grid(padding=(0, 2))
    watched, train = follower.watched, follower.watched.train
    speeds = {
        "tokens_per_second": "{:,.0f} tokens/s",
        "elapsed_time_per_iteration_ms": "{:,.1f} ms per iteration",
        "tflops_per_gpu": "{:.3g} TFLOP/s per rank",
    }
    known = ((number(train.get(key)), text) for key, text in speeds.items())
    throughput = ", ".join(text.format(value) for value, text in known if value is not None)
    troubles = (
        (watched.num_not_finite, "records without a finite loss"),
        (number(train.get("skipped_iterations")), "iterations skipped since the previous record"),
        (watched.num_unreadable_lines, "invalid lines in metrics.jsonl"),
    )
    trouble = ", ".join(f"{count:,.0f} {what}" for count, what in troubles if count)
    validation = _NOTHING
    if valid := watched.valid:
        ppl, ema = number(valid.get("lm_loss_ppl")), number(valid.get("ema_lm_loss"))
        perplexity = f" (perplexity {ppl:,.2f})" if ppl else ""
        averaged = f", averaged weights {ema:.4f}" if ema is not None else ""
        at = f" at iteration {valid['iteration']:,}"
        validation = number_text(valid.get("lm_loss"), ".4f") + perplexity + averaged + at
    cells["validation"], cells["throughput"] = Text(validation), Text(throughput or _NOTHING)
    cells["trouble"] = Text(trouble, style="red")
    for name in ("loss", "validation", "learning rate", "grad norm", "throughput", "memory", "trouble"):
        if cells[name]:
            table.add_row(Text(name, style="dim"), cells[name])
    return table


def _layer_lines(layers: Sequence[WorstLayer]) -> list[RenderableType]:
    if not layers:
        return []
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layer", "max/mean", "dead experts", "dropped", "router entropy"):
        table.add_column(name, justify="right")
    for layer in layers[:_LAYERS]:
        table.add_row(
            str(layer.layer),
            number_text(layer.max_over_mean, ".2f"),
            Text(f"{layer.num_dead} of {layer.num_experts}", style="red" if layer.num_dead else ""),
            number_text(layer.dropped, ".1%"),
            number_text(layer.entropy, ".3f"),
        )
    head = f"the {min(_LAYERS, len(layers))} least balanced of {len(layers)} MoE layers"
    return [Text(head, style="dim"), table]


def _age_line(follower: Follower) -> Text:
    if follower.trouble:
        return Text(f"cannot be read ({_printable(follower.trouble)})", style="bold red")
    age, usual = follower.age_seconds(), follower.watched.usual_interval_seconds
    if age is None:
        return Text(f"waiting for {_printable(str(follower.folder.metrics))}", style="dim")
    last, style = f"the last record is {duration(age)} old", "dim"
    if follower.status():
        text = f"{last}; the run has ended"
    elif usual is None:
        text = f"no train record yet; {last}"
    elif follower.is_late():
        style, every = "bold yellow", f"usual interval {duration(usual)}"
        text = f"no record for {duration(age)} ({every}). Is the run still running? See {follower.folder.log}"
    else:
        text = f"{last} (usual interval {duration(usual)})"
    return Text(_printable(text), style=style)


def _printable(text: str) -> str:
    """Replaces control characters, which names and texts from files may contain."""
    return "".join(character if character.isprintable() else "?" for character in text)


def buckets(values: Sequence[float | None], num_buckets: int) -> list[float | None]:
    """Means of up to `num_buckets` groups of adjacent values. The mean of a group of only None is None."""
    count = min(num_buckets, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    groups = ([value for value in values[a:b] if value is not None] for a, b in pairwise(edges))
    return [sum(group) / len(group) if group else None for group in groups]


def sparkline(values: Sequence[float | None], width: int, *, ascii_only: bool = False) -> str:
    """Draws values in at most `width` characters, scaled from the lowest to the highest value."""
    means, ramp = buckets(values, width), "_.-=+*%#" if ascii_only else "▁▂▃▄▅▆▇█"
    low, high = _range(means)
    steps = (mean if mean is None else round((mean - low) / (high - low) * (len(ramp) - 1)) for mean in means)
    return "".join(" " if step is None else ramp[step] for step in steps)


def plot(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """Draws a Braille plot of `height` lines of `width` characters; each character has 2 x 4 dots."""
    means, num_rows = buckets(values, 2 * width), 4 * height
    low, high = _range(means)
    cells, before = [[0] * width for _ in range(height)], None
    for column, mean in enumerate(means):
        if mean is None:
            before = None
            continue
        row = round((high - mean) / (high - low) * (num_rows - 1))
        # Fill from the previous row to keep steep curves connected.
        first, last = (row, row) if before is None else (min(row, before + 1), max(row, before - 1))
        for at in range(first, last + 1):
            cells[at // 4][column // 2] |= _DOTS[at % 4][column % 2]
        before = row
    return ["".join(chr(0x2800 + dots) for dots in line) for line in cells]  # Braille begins there


def _range(means: Sequence[float | None]) -> tuple[float, float]:
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return (low, high) if high > low else (low - 1.0, low + 1.0)
