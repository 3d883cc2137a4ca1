"""Downloads from a small hub on 127.0.0.1 that fails as it is told to: equal bytes, or a one-line error."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("pyarrow")

from helpers.servers.hub import Fault, HubServer, leave_host_settings, write_fineweb_parquet
from moe_exp.commands.data import main
from moe_exp.data.download import hub
from moe_exp.data.download.hub import download
from moe_exp.data.download.sources import resolve_source
from moe_exp.data.download.stores import Listing
from moe_exp.host.object_store import StoredFile

REPOSITORY = "HuggingFaceFW/fineweb-edu"
COMMAND = [REPOSITORY, "--pattern", "sample/10BT/*", "--output-dir"]
NAMES = [f"sample/10BT/{number:03d}_00000.parquet" for number in range(3)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dataset")
    for number, name in enumerate(NAMES):
        write_fineweb_parquet(folder / name, num_documents=20 * (number + 1))
    (folder / "README.md").write_text("# A dataset\n")
    (folder / "data").mkdir()
    shutil.copy(folder / NAMES[0], folder / "data/train.parquet")
    (folder / "extra.jsonl").write_text('{"text": "a small file, kept in git"}\n')
    return folder


@pytest.fixture(autouse=True)
def clean_environment(tmp_path, monkeypatch):
    """Nothing of the host's hub settings; every call reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE anew."""
    leave_host_settings(monkeypatch, tmp_path / "hf_home", "TRANSFORMERS_")


@pytest.fixture
def server(dataset, monkeypatch):
    with HubServer(dataset, repository=REPOSITORY) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def quick(monkeypatch):
    """Waits are noted, not waited: ours and the library's, which share time.sleep."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    return waits


def source(*patterns: str, **changes: str):
    return resolve_source(REPOSITORY, patterns=patterns or ("sample/10BT/*",), **changes)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


def test_files_and_manifest(server, dataset, tmp_path):
    server.page_entries, server.redirect = 2, True
    folder = tmp_path / "raw"
    assert download(source(), folder) == [folder / name for name in NAMES]
    assert contents(folder) == contents(dataset)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "sample"]  # no traces
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["commit"], manifest["settings"]["revision"]) == (server.main, "main")
    given = contents(dataset)
    assert manifest["sha256"] == {name: hashlib.sha256(given[name]).hexdigest() for name in NAMES}
    assert {one["name"]: one["bytes"] for one in manifest["outputs"]} == {n: len(given[n]) for n in NAMES}


def test_offline(server, tmp_path, monkeypatch):
    paths = download(source(), tmp_path / "raw")
    server.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for dry_run in (False, True):
        assert download(source(), tmp_path / "raw", dry_run=dry_run) == paths
    assert server.requests == []
    paths[1].unlink()
    rule = r"^HF_HUB_OFFLINE=1: 1 of 3 files are missing in .*, such as sample/10BT/001.* Fix: "
    with pytest.raises(ValueError, match=rule):
        download(source(), tmp_path / "raw")
    with pytest.raises(ValueError, match=r"^HF_HUB_OFFLINE=1: the files of .* have not been"):
        download(source(), tmp_path / "other")


FAULTS = {
    "429": [Fault(status=429, headers={"Retry-After": "1"}), Fault(status=429, method="HEAD")],
    "5xx": [
        Fault(status=503, times=2), Fault(status=500, method="HEAD"), Fault(status=502, where="/tree/"),
        Fault(status=503, where="/revision/"),
    ],
    "cut": [
        Fault(cut_after=0), Fault(cut_after=1000), Fault(cut_after=10, where="/tree/"),
        Fault(cut_after=30_000),
    ],
    "reset": [
        Fault(reset_after=0), Fault(reset_after=20_000, times=2), Fault(reset_after=0, where="/revision/"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_what_passes_is_waited_out(server, dataset, tmp_path, quick, monkeypatch, faults):
    # so that the library continues inside of these small files
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    server.faults = faults
    assert download(source(), tmp_path / "raw") == [tmp_path / "raw" / name for name in NAMES]
    assert contents(tmp_path / "raw") == contents(dataset)
    assert not [fault for fault in faults if fault.times], "a fault that did not happen"
    assert quick


@pytest.mark.parametrize(
    "fault",
    [Fault(status=503, times=999), Fault(cut_after=500, times=999), Fault(reset_after=500, times=999)],
    ids=["503", "cut", "reset"],
)
def test_what_does_not_pass_is_an_error_and_complete_files_are_kept(server, tmp_path, quick, capsys, fault):
    fault.where = NAMES[1]
    server.faults = [fault]
    command = [*COMMAND, str(tmp_path / "raw"), "--retries", "2"]
    assert main("download", command) == 1
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"moe-exp data: {REPOSITORY}: {server.url} keeps failing (") and "Fix: " in line
    assert not (tmp_path / "raw").exists()
    fault.times = 0
    server.requests.clear()
    assert main("download", command) == 0
    assert server.downloads(NAMES[1])
    assert not server.downloads(NAMES[0])


def test_retry_after_is_honoured(server, tmp_path, quick):
    server.faults = [Fault(status=429, where="/revision/", headers={"Retry-After": "77"})]
    download(source(), tmp_path / "raw")
    assert 77 <= max(quick) <= 77 * 1.5


def test_waits_grow_and_a_complete_file_resets_them(quick):
    left, outcomes = [5], iter([0, 0, 0, 1, 0, 0, None])  # files that come before it fails, or None: done

    def action() -> None:
        if (come := next(outcomes)) is not None:
            left[0] -= come
            raise ConnectionResetError(104, "reset")

    hub._asked(action, source(), 4, lambda: left[0])
    assert all(base <= wait <= 1.5 * base for base, wait in zip([1, 2, 4, 1, 2, 4], quick, strict=True))
    outcomes = iter([0] * 4)
    with pytest.raises(ConnectionError):
        hub._asked(action, source(), 4, lambda: left[0])


def test_what_may_pass():
    for error in (OSError(28, "No space left on device"), PermissionError(13, "denied"), ValueError("a bug")):
        assert not hub.passes(error)
    for error in (ConnectionResetError(104, "reset"), OSError("Consistency check failed")):
        assert hub.passes(error)


def test_pattern_that_matches_nothing(server, tmp_path):
    rule = r"^pattern=sample/11BT/\*: matches no file in .*fineweb-edu at main, which has README\.md, .*Fix: "
    with pytest.raises(ValueError, match=rule):
        download(source("sample/10BT/*", "sample/11BT/*"), tmp_path / "raw")
    assert server.downloads() == []


@pytest.mark.parametrize("patterns", [(), ("*",)])
def test_all_data_files_come_without_the_readme_beside_them(server, tmp_path, patterns):
    paths = download(resolve_source(REPOSITORY, patterns=patterns), tmp_path / "raw")
    names = [path.relative_to(tmp_path / "raw").as_posix() for path in paths]
    assert names == ["data/train.parquet", "extra.jsonl", *NAMES]


@pytest.mark.parametrize("difference", [-1, 1])
def test_size_that_disagrees_with_the_listing(server, dataset, tmp_path, difference):
    size = len(contents(dataset)[NAMES[2]])
    server.sizes[NAMES[2]] = listed = size + difference
    rule = rf"^{NAMES[2]}: has {size:,} bytes, but {server.url} lists {listed:,} at {server.main}\. Fix: "
    with pytest.raises(ValueError, match=rule):
        download(source(), tmp_path / "raw")
    assert not (tmp_path / "raw").exists()


def test_bytes_that_are_not_those_of_the_listing(server, dataset, tmp_path, monkeypatch):
    """Right size, wrong content: the second fetch mends it, or it is an error."""
    fetched = []
    snapshot = hub._Fetcher._get

    def get_and_damage(fetcher, files):
        snapshot(fetcher, files)
        fetched.append(1)
        if len(fetched) <= damaged:
            path = fetcher.folder / NAMES[0]
            path.write_bytes(bytes(1) + path.read_bytes()[1:])

    monkeypatch.setattr(hub._Fetcher, "_get", get_and_damage)
    damaged = 1
    download(source(), tmp_path / "mended")
    assert contents(tmp_path / "mended") == contents(dataset)
    damaged = 9
    with pytest.raises(ValueError, match=rf"^{NAMES[0]}: its hash differs .* after two downloads\. Fix: "):
        download(source(), tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


def test_small_files_are_checked_by_their_git_hash(server, dataset, tmp_path):
    (path,) = download(source("extra.jsonl"), tmp_path / "raw")
    assert path.read_bytes() == (dataset / "extra.jsonl").read_bytes()
    listed = StoredFile((dataset / "extra.jsonl").stat().st_size, "0" * 40)
    assert hub._hash_file(dataset / "extra.jsonl", listed) is None


def test_file_that_is_gone_or_cut_is_fetched_again(server, dataset, tmp_path):
    paths = download(source(), tmp_path / "raw")
    paths[0].unlink()
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    server.requests.clear()
    download(source(), tmp_path / "raw")
    assert contents(tmp_path / "raw") == contents(dataset)
    assert [bool(server.downloads(name)) for name in NAMES] == [True, False, True]
    assert not [path for _, path in server.requests if NAMES[1] in path], "of complete files nothing is asked"


def test_progress_counts_bytes_on_disk(tmp_path):
    (tmp_path / ".cache/huggingface/download").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/download/xyz.incomplete").write_bytes(bytes(30))
    (tmp_path / "a.parquet").write_bytes(bytes(100))
    files = {"a.parquet": StoredFile(100, ""), "b.parquet": StoredFile(200, "")}
    assert hub.bytes_there(tmp_path, Listing("", files)) == 130


def test_file_that_was_cut_while_the_download_rested(server, dataset, tmp_path, quick):
    """The library takes it for complete: it notes that it has fetched it, and looks no more."""
    server.faults = [Fault(status=503, where=NAMES[2], times=99)]
    with pytest.raises(ConnectionError):
        download(source(), tmp_path / "raw", max_failures=1)
    server.faults.clear()
    cut = tmp_path / "raw.partial" / NAMES[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    download(source(), tmp_path / "raw")
    assert contents(tmp_path / "raw") == contents(dataset)


def test_commit_is_pinned_until_told_otherwise(server, dataset, tmp_path):
    folder = tmp_path / "raw"
    paths, first = download(source(), folder), server.main
    newer = tmp_path / "newer"
    write_fineweb_parquet(newer / NAMES[0], ["another text"])
    server.move_main(newer)
    paths[1].unlink()
    assert len(download(source(), folder)) == 3
    assert contents(folder) == contents(dataset)
    assert json.loads((folder / "manifest.json").read_text())["commit"] == first
    assert download(source(), folder, start_over=True) == [folder / NAMES[0]]
    assert paths[0].read_bytes() == (newer / NAMES[0]).read_bytes()
    assert json.loads((folder / "manifest.json").read_text())["commit"] == server.main != first
    download(source(revision=first), tmp_path / "older")
    assert contents(tmp_path / "older") == contents(dataset)


def test_other_settings_are_refused(server, tmp_path):
    download(source("sample/10BT/000*"), tmp_path / "raw")
    with pytest.raises(ValueError, match=r"was made with patterns=.*Fix: use --start-over"):
        download(source(), tmp_path / "raw")


def test_gated_dataset(server, tmp_path, monkeypatch):
    server.token = "hf_right"
    rule = rf"^source={REPOSITORY}: access requires .*\. Fix: .*{REPOSITORY}, and set HF_TOKEN"
    for token in ("", "hf_wrong"):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(ValueError, match=rule):
            download(source(), tmp_path / "raw")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert len(download(source(), tmp_path / "raw")) == 3


def test_private_or_missing_dataset_and_missing_revision(server, tmp_path):
    with pytest.raises(ValueError, match=r"^source=HuggingFaceFW/fineweb-edo: no such public dataset "):
        download(resolve_source("HuggingFaceFW/fineweb-edo"), tmp_path / "raw")
    with pytest.raises(ValueError, match=rf"^revision=v9: not found in {REPOSITORY}\. Fix: "):
        download(source(revision="v9"), tmp_path / "raw")
    assert len(download(source(), tmp_path / "raw")) == 3  # what never began is not in the way


def test_disk_too_small(server, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    download(source(), tmp_path / "raw", dry_run=True)
    assert "not enough" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"has 1 kB free; the download of fineweb-edu requires .* Fix: free"):
        download(source(), tmp_path / "raw")
    assert server.downloads() == []


def test_dry_run_writes_nothing(server, dataset, tmp_path, capsys):
    assert main("download", [*COMMAND, str(tmp_path / "raw"), "--dry-run", "--bandwidth", "0.001"]) == 0
    num_bytes = sum(map(len, contents(dataset).values()))
    shown = capsys.readouterr().out
    assert f"{num_bytes:,}" in shown
    assert f"{num_bytes / 1000 / 3600:.1f} hours" in shown
    assert server.downloads() == []
    assert not [path for path in tmp_path.iterdir() if "raw" in path.name]


CHILD = """
import os, signal, sys
from pathlib import Path
from moe_exp.data.download import hub
from moe_exp.data.download.sources import resolve_source
from moe_exp.data.download.stores import Listing
from moe_exp.host.object_store import StoredFile
if sys.argv[3] == "checking":
    hub._hash_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
hub.download(resolve_source(sys.argv[1], patterns=["sample/10BT/*"]), Path(sys.argv[2]), max_workers=1)
"""


SECOND = pytest.param("second file", marks=pytest.mark.slow)


@pytest.mark.parametrize("point", ["listing", "first file", SECOND, "last file", "checking"])
def test_killed_and_called_again(server, dataset, tmp_path, monkeypatch, point):
    """What is complete then is not fetched again, and the result is that of an undisturbed run."""
    where, num_complete = {
        "listing": ("/tree/", 0), "first file": (NAMES[0], 0), "second file": (NAMES[1], 1),
        "last file": (NAMES[2], 2), "checking": ("never", 3),
    }[point]  # fmt: skip
    server.faults = [Fault(hold_after=9_000 if "file" in point else 10, where=where)]
    folder = tmp_path / "raw"
    command = [sys.executable, "-c", CHILD, REPOSITORY, str(folder), point]
    child = subprocess.Popen(command, stderr=subprocess.PIPE)
    if point != "checking":  # there the child ends itself
        assert server.held.wait(60)
        child.kill()
    _, messages = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, messages.decode()
    assert not folder.exists()
    complete = [name for name in NAMES if (tmp_path / "raw.partial" / name).exists()]
    assert len(complete) == num_complete
    server.requests.clear()
    leftovers = []

    def noted(*_):
        leftovers.extend((tmp_path / "raw.partial").rglob("*.incomplete"))

    monkeypatch.setattr(hub, "check_free_disk", noted)
    assert download(source(), folder) == [folder / name for name in NAMES]
    assert contents(folder) == contents(dataset)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "sample"]
    assert [name for name in NAMES if server.downloads(name)] == NAMES[num_complete:]
    assert bool([path for _, path in server.requests if "/revision/main" in path]) == (point == "listing")
    assert not leftovers, "the disk is checked while parts of a dead process lie there"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("../out.jsonl", "it leads outside the download folder"),
        ("sample/10BT/../../../out.parquet", "it leads outside the download folder"),
        ("/tmp/out.jsonl", "it leads outside the download folder"),
        ("./out.jsonl", "it leads outside the download folder"),
        ("../out.txt", "it leads outside the download folder"),
        ("sample/10BT/a\nb.parquet", "it has control characters"),
        ("sample/10BT/\x1b[2J.parquet", "it has control characters"),
        ("sample/10BT/\ud800.parquet", "it has control characters"),
        ("x" * 300 + ".jsonl", "it exceeds the limit for file names"),
        ("manifest.json/x.jsonl", "manifest.json is reserved for the download itself"),
        ("running.json/x.jsonl", "running.json is reserved for the download itself"),
        (".cache/huggingface/x.jsonl", ".cache is reserved for the download itself"),
        ("extra.jsonl/x.jsonl", "extra.jsonl is also a file"),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_hostile_names_are_refused_before_any_file_is_asked_for(name, rule, dry_run, server, tmp_path):
    server.also_listed = [name]
    with pytest.raises(ValueError) as error:
        download(source("*.jsonl", "*.parquet"), tmp_path / "data/raw", dry_run=dry_run)
    assert rule in str(error.value)
    assert str(error.value).isprintable() and len(str(error.value)) < 600
    assert not server.downloads()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_listing_on_disk_is_checked_too(server, tmp_path):
    """A folder that somebody else has begun."""
    download(source(), tmp_path / "raw")
    manifest = tmp_path / "raw/manifest.json"
    content = json.loads(manifest.read_text())
    content["outputs"][0]["name"] = "../../gone"
    content["sha256"]["../../gone"] = "0" * 64
    manifest.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^\.\./\.\./gone: .* leads outside the download folder"):
        download(source(), tmp_path / "raw")
