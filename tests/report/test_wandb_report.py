"""The wandb report, by wandb's own models and client, and what it says where it cannot be made."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.warm_runs import answer_warm
from moe_exp.report.wandb_report import build_report, mirrored_runs, wandb_report
from moe_exp.training.metrics import curves

KEY = "0123456789abcdef" * 2 + "5ec4e700"
TIME = "2026-01-01T00:00:00"


def train(iteration: int, *, num_layers: int = 2, **changes: Any) -> dict[str, Any]:
    shared = {"tokens_per_expert": [60, 68], "router_entropy": 0.69}
    shared |= dict.fromkeys(("dead_fraction", "dropped_fraction"), 0.0)
    layers = range(1, num_layers + 1)
    experts = [{"layer": layer, "max_over_mean": 1.0 + layer / 2} | shared for layer in layers]
    return {
        "kind": "train", "iteration": iteration, "consumed_tokens": 1000 * iteration,
        "consumed_flops": 1e9 * iteration, "training_seconds": 0.5 * iteration, "lm_loss": 4.25,
        "learning_rate": 1e-3, "grad_norm": 1.5, "tokens_per_second": 2000.0, "tflops_per_gpu": 0.5,
        "elapsed_time_per_iteration_ms": 500.0, "peak_memory_bytes": 2_500_000_000, "experts": experts,
    } | changes  # fmt: skip


AXES = {"consumed_tokens": 2000, "consumed_flops": 2e9, "training_seconds": 1.0}
VALID = {"kind": "valid", "iteration": 2, "lm_loss": 4.5} | AXES


def make_run(folder: Path, wandb_id="abc12345", *, is_moe=True, project="p", start="run") -> Path:
    """A run folder of a run with WANDB_PROJECT; `start`: wandb's prefix of a start, online or offline."""
    layers = 2 if is_moe else 0
    (folder / "wandb" / f"{start}-20260101_100000-{wandb_id}").mkdir(parents=True)
    (folder / "wandb" / "run_id").write_text(wandb_id)
    settings = f"use_moe: {str(is_moe).lower()}\nmoe_type: dmoe\nwandb_project: {project}\n"
    (folder / "config.yaml").write_text(settings)
    records = [train(1, num_layers=layers), train(2, num_layers=layers), VALID]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def needs_wandb() -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("wandb_workspaces")


def spec_of(paths: list[Path], **options: Any) -> dict[str, Any]:
    """What would be sent, after a round through wandb's models in both directions."""
    options = {"project": "p", "entity": "me", "title": "Dense against MoE"} | options
    report = build_report(mirrored_runs(paths, project="p"), **options)
    from wandb_workspaces.reports.v2 import internal  # after it was imported with its warnings off

    sent = report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
    spec = internal.Spec.model_validate_json(sent)
    return dict(spec.model_dump(by_alias=True, exclude_none=True))


def grids(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [block["metadata"] for block in spec["blocks"] if block["type"] == "panel-grid"]


def panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for grid in grids(spec) for panel in grid["panelBankSectionConfig"]["panels"]]


def test_panels(needs_wandb: None, tmp_path: Path) -> None:
    spec = spec_of([make_run(tmp_path / "dense", "d1", is_moe=False), make_run(tmp_path / "moe", "m1")])
    configs = [panel["config"] for panel in panels(spec)]
    drawn = {(config.get("xAxis"), *config["metrics"]) for config in configs}
    assert {(f"{kind}/{axis}", f"{kind}/lm_loss") for kind in ("train", "valid") for axis in AXES} <= drawn
    # Every name is one under which a run writes to wandb, and x is written together with y.
    for x, *y in drawn - {("train/consumed_tokens",)}:
        written = curves(VALID if y[0].startswith("valid/") else train(1))
        assert set(y) <= set(written) and (x is None or x in written)
    by_layer = [config for config in configs if "metricRegex" in config]
    keys = ("max_over_mean", "dead_fraction", "dropped_fraction", "router_entropy")
    assert [config["metricRegex"] for config in by_layer] == [rf"moe/layer_\d+/{key}" for key in keys]
    assert all(config["useMetricRegex"] for config in by_layer)


def test_panels_fill_the_grid_without_overlap(needs_wandb: None, tmp_path: Path) -> None:
    for grid in grids(spec_of([make_run(tmp_path / "moe")])):
        layouts = [panel["layout"] for panel in grid["panelBankSectionConfig"]["panels"]]
        spans = [(range(a["x"], a["x"] + a["w"]), range(a["y"], a["y"] + a["h"])) for a in layouts]
        cells = [(x, y) for xs, ys in spans for x in xs for y in ys]
        assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23


def test_run_sets_hold_these_runs_alone(needs_wandb: None, tmp_path: Path) -> None:
    ids_of = {"dense": "d1", "moe": "m1", "other": "m2"}
    paths = [make_run(tmp_path / name, id_, is_moe=name != "dense") for name, id_ in ids_of.items()]
    spec = spec_of([*paths, paths[0]])
    loss, load = grids(spec)[0], grids(spec)[1]

    def ids(grid: dict[str, Any]) -> dict[str, list[str]]:
        return {one["name"]: one["filters"]["filters"][0]["value"] for one in grid["runSets"]}

    assert ids(loss) == {"dense": ["d1"], "MoE": ["m1", "m2"]} and ids(load) == {"MoE": ["m1", "m2"]}
    keys = [one["filters"]["filters"][0]["key"] for one in loss["runSets"]]
    assert keys == [{"section": "run", "name": "name"}] * 2  # wandb's name: the id
    colors = loss["customRunColors"]
    assert len(set(colors.values())) == 3 and set(colors) >= {"d1", "m1", "m2"}
    assert len(grids(spec_of([paths[0]]))) == len(grids(spec)) - 1  # without a MoE run, none on experts


def test_text_of_the_report(needs_wandb: None, tmp_path: Path) -> None:
    odd = make_run(tmp_path / "<script>|`x`_y", "d1", is_moe=False)
    spec = spec_of([odd, make_run(tmp_path / "moe", "m1")])
    (table,) = [block["content"] for block in spec["blocks"] if block["type"] == "markdown-block"]
    rows = table.splitlines()
    name, numbers = "&#60;script&#62;&#124;&#96;x&#96;&#95;y", "2,000 | 4.2500 | 4.5000 | 2,000 | 2.50 GB"
    assert rows[2] == f"| {name} | dense | 2 | {numbers} |"
    assert rows[3].startswith("| moe | dmoe | 2 | ") and len(rows) == 4
    with pytest.raises(ValueError, match=r"^TITLE=x{20}\.\.\.: must have at most 128 characters"):
        spec_of([tmp_path / "moe"], title="x" * 129)


def test_runs_that_wandb_does_not_have(tmp_path: Path) -> None:
    names = ("without", "off line", "elsewhere", "nothing")
    without, offline, elsewhere, nothing = (tmp_path / name for name in names)
    make_run(offline, start="offline-run")
    make_run(elsewhere, project="q")
    (make_run(without) / "wandb" / "run_id").unlink()
    with pytest.raises(ValueError) as error:
        mirrored_runs([without, offline, elsewhere, nothing], project="p")
    lines = str(error.value).splitlines()
    starts = [
        f"RUN={without}: has no wandb run: WANDB_PROJECT was not set. Fix: set WANDB_PROJECT=p for the",
        f"RUN={offline}: is not completely in wandb: 1 of its starts was offline. Fix: wandb sync -p p '",
        f"RUN={elsewhere}: is in the wandb project q, not in p. Fix: give --project q.",
        f"RUN={nothing}: must be a run folder with a metrics.jsonl. Fix: give a run folder",
    ]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
    with pytest.raises(ValueError, match=r"^RUN=: at least one is required\."):
        mirrored_runs([], project="p")
    # `wandb sync` leaves this mark; a run that was synced may be in any project.
    (next((offline / "wandb").glob("offline-run-*")) / "run-abc12345.wandb.synced").touch()
    assert [run.wandb_id for run in mirrored_runs([offline], project="other")] == ["abc12345"]


@pytest.mark.parametrize("package", ["wandb", "wandb_workspaces"])
def test_a_missing_package_is_one_line(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "wandb":
        pytest.importorskip("wandb_workspaces")
    name = package.replace("_", "-")
    fix = rf"pip install 'moe-exp\[wandb\]', or pip install {name}"
    with pytest.raises(ValueError, match=rf"^PACKAGE={name}: is not installed\. Fix: {fix}\.$"):
        wandb_report([make_run(tmp_path / "a")], project="p")


class _Wandb(BaseHTTPRequestHandler):
    """As much of wandb's server as saving a report asks for; keeps what it was sent in `saved`."""

    saved: list[dict[str, Any]]
    forbidden = False

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/graphql":  # telemetry
            self._answer({})
            return
        asked, variables = json.loads(body)["query"], json.loads(body).get("variables")
        if "upsertView" in asked and self.forbidden:
            self._answer({"errors": [{"message": "permission denied"}]}, 403)
        elif "upsertView" in asked:
            self.saved.append(variables)
            place = {"id": "x", "name": variables["projectName"], "entityName": variables["entityName"]}
            view = {key: variables[key] for key in ("type", "name", "displayName", "description", "spec")}
            view |= {"project": place, "id": "Vmlldzox", "updatedAt": TIME}
            self._answer({"data": {"upsertView": {"view": view, "inserted": True}}})
        elif "models(" in asked:
            node = {"id": "x", "name": "p", "entityName": "me", "createdAt": TIME}
            node |= {"isBenchmark": False, "user": None}
            page = {"endCursor": None, "hasNextPage": False}
            edges = [{"node": node, "cursor": "c"}]
            self._answer({"data": {"models": {"edges": edges, "pageInfo": page}}})
        else:
            viewer = {"id": "u", "entity": "me", "username": "me", "email": "", "flags": "{}"}
            self._answer({"data": {"viewer": viewer | {"teams": {"edges": []}}}})

    def _answer(self, value: dict[str, Any], code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    handler = type("Handler", (_Wandb,), {"saved": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def report_in_a_process(home: Path, run: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """wandb keeps keys and servers for the life of a process, so each case gets one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environ = kept | {"HOME": str(home), "NETRC": str(home / "netrc")} | environ
    return answer_warm(["report", "wandb", str(run), "--project", "p"], environ, home)


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({}, "WANDB_API_KEY=: wandb has no key. Fix: run `wandb login`, or set WANDB_API_KEY."),
        ({"WANDB_API_KEY": "shortsecretkey"}, "WANDB_API_KEY=...: wandb rejected the key ("),
    ],
    ids=["none", "invalid"],
)
def test_a_bad_key_is_one_line_without_it(environ, line, needs_wandb: None, tmp_path: Path) -> None:
    done = report_in_a_process(tmp_path, make_run(tmp_path / "a"), **environ)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert "shortsecretkey" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"moe-exp report: {line}")


@pytest.mark.parametrize("forbidden", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_saving_through_wandbs_own_client(needs_wandb: None, tmp_path: Path, server, forbidden) -> None:
    handler = server.RequestHandlerClass
    handler.forbidden = forbidden
    address = f"http://127.0.0.1:{server.server_port}"
    done = report_in_a_process(tmp_path, make_run(tmp_path / "a"), WANDB_BASE_URL=address, WANDB_API_KEY=KEY)
    if forbidden:
        assert done.returncode == 1 and handler.saved == [] and "Traceback" not in done.stderr
        assert "moe-exp report: PROJECT=p: wandb rejected the report (" in done.stderr.splitlines()[-1]
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{address}/me/p/reports/Dense-against-MoE--Vmlldzox\n"
        (sent,) = handler.saved
        about = [sent[key] for key in ("entityName", "projectName", "displayName", "type")]
        assert about == ["me", "p", "Dense against MoE", "runs"]
        assert "abc12345" in sent["spec"] and len(panels(json.loads(sent["spec"]))) > 10
    assert KEY not in done.stdout + done.stderr + json.dumps(handler.saved)
    assert all(KEY.encode() not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
