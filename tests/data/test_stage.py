"""A step of the corpus: published whole or not at all, resumed, refused, one process at a time."""

import json
import os
import shutil
from pathlib import Path

import pytest
import xxhash

from helpers.ranks import RankError, run_on_ranks
from moe_exp.commands.data import main
from moe_exp.data import stage as stage_module
from moe_exp.data.stage import check_free_disk, fingerprint, run_stage
from moe_exp.host import files
from moe_exp.host.files import file_hash, write_json

KILLED = 9
BOTH_KINDS = pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "files"])
FORKS = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")  # of Python 3.12


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text("input\n")
    return path


def make(output, source, content="made", *, settings=None, stop=False, is_folder=True, **options):
    """A step that appends to a file what it is given; returns (manifest, whether it was done before)."""
    options |= {"settings": settings or {"a": 1}, "inputs": [source], "is_folder": is_folder}
    with run_stage("test", output, **options) as stage:
        if stage.manifest is not None:
            return stage.manifest, True
        path = stage.folder / f"{output.name}.out"
        with path.open("a") as file:
            file.write(content)
        if stop:
            raise KeyboardInterrupt
        return stage.finish([path], num_documents=7), False


def begin(*given, **options):
    """As `make`, interrupted."""
    with pytest.raises(KeyboardInterrupt):
        make(*given, stop=True, **options)


def refused(rule, *given, **options):
    with pytest.raises(ValueError, match=rule):
        make(*given, **options)


def run_other(output, source, **options):
    """Another step with the same output."""
    with run_stage("other", output, settings={"a": 1}, inputs=[source], **options):
        pass


def made_file(output, is_folder):
    return output / f"{output.name}.out" if is_folder else output.with_name(f"{output.name}.out")


def partial(output):
    return output.with_name(output.name + ".partial")


@BOTH_KINDS
class TestBothKinds:
    def test_made_once(self, tmp_path, source, is_folder):
        output = tmp_path / "deep/er/out"
        manifest, was_done = make(output, source, is_folder=is_folder)
        assert not was_done and made_file(output, is_folder).read_text() == "made"
        assert {"stage": "test", "settings": {"a": 1}, "num_documents": 7}.items() <= manifest.items()
        assert manifest["inputs"] == [fingerprint(source)]
        known = {"name": "out.out", "bytes": 4, "hash": xxhash.xxh3_128_hexdigest(b"made")}
        assert manifest["outputs"] == [known]
        names = {path.name for path in output.parent.rglob("*") if not path.name.endswith(".lock")}
        assert names == {"out.out", *(("out", "manifest.json") if is_folder else ("out.manifest.json",))}
        assert make(output, source, "more", is_folder=is_folder) == (manifest, True)
        assert made_file(output, is_folder).read_text() == "made"

    def test_goes_on_after_an_interruption(self, tmp_path, source, is_folder):
        output = tmp_path / "out"
        begin(output, source, "first ", is_folder=is_folder)
        assert not made_file(output, is_folder).exists() and partial(output).exists()
        (partial(output) / "state.json.77.tmp").write_text("of a write_json that was killed")
        make(output, source, "second", is_folder=is_folder)
        assert made_file(output, is_folder).read_text() == "first second"
        assert not partial(output).exists() and not list(tmp_path.rglob("*.tmp"))

    @pytest.mark.parametrize("stop", [True, False])
    def test_refuses_other_settings_and_inputs(self, tmp_path, source, is_folder, stop):
        output, verb = tmp_path / "out", "was started" if stop else "was made"
        (begin if stop else make)(output, source, is_folder=is_folder)
        for settings, rule in (({"a": 2}, "a=1, not 2"), ({"a": 1, "b": 3}, "b=None, not 3")):
            rule = rf"out: {verb} with {rule}\. Fix: use --start-over to recreate it, or choose another"
            refused(rule, output, source, settings=settings, is_folder=is_folder)
        source.write_text("Input\n")
        rule = rf"out: {verb} from other inputs \(in.jsonl has changed\)"
        refused(rule, output, source, is_folder=is_folder)
        source.write_text("input\n")
        with pytest.raises(ValueError, match=rf"out: {verb} by the step test, not other\. Fix: use --start"):
            run_other(output, source, is_folder=is_folder)

    def test_a_finished_step_whose_files_are_gone_is_not_finished(self, tmp_path, source, is_folder):
        output = tmp_path / "out"
        make(output, source, is_folder=is_folder)
        damages = {"has 3 bytes": lambda path: path.write_text("mad"), "is missing": Path.unlink}
        for found, damage in damages.items():
            damage(made_file(output, is_folder))
            rule = rf"out.out: {found}; .* lists 4 bytes. Fix: use --start-over"
            refused(rule, output, source, is_folder=is_folder)
        make(output, source, start_over=True, is_folder=is_folder)
        assert made_file(output, is_folder).read_text() == "made"

    def test_killed_while_it_removes_its_folder_the_next_call_does(self, tmp_path, source, is_folder):
        output = tmp_path / "out"
        make(output, source, is_folder=is_folder)
        (partial(output) / "made").mkdir(parents=True)  # RUNNING had gone first
        assert make(output, source, is_folder=is_folder)[1]
        assert not partial(output).exists()

    @FORKS
    def test_ended_while_it_publishes_nothing_is_lost(self, tmp_path, source, is_folder):
        """Killed at every rename and removal: what had a name before has content afterwards."""
        new = {"settings": {"a": 2}, "start_over": True, "is_folder": is_folder}
        for end_at in range(1, 100):
            output, calls = tmp_path / f"out{end_at}", iter(range(1, end_at))
            make(output, source, "old", is_folder=is_folder)
            if not killed(lambda *_: next(calls, None) is None, output, source, "new", **new):  # noqa: B023
                break  # it has fewer calls
            paths = [*tmp_path.glob(f"out{end_at}*/*.out"), *tmp_path.glob(f"out{end_at}*.out")]
            assert {"old", "new"} & {path.read_text() for path in paths}  # one of them is there, whole
            make(output, source, "new", **new)
            assert made_file(output, is_folder).read_text() == "new"
            assert not partial(output).exists()
        assert 5 < end_at < 99


def killed(dies, *given, **options):
    """As `make`, in a fork that ends, as by a SIGKILL, before the first rename or removal whose arguments
    `dies` is true for; returns whether there was one.
    """
    if (child := os.fork()) == 0:
        code = 1
        try:
            for owner, name in ((Path, "replace"), (Path, "rename"), (Path, "unlink"), (shutil, "rmtree")):
                setattr(owner, name, ending(getattr(owner, name), dies))
            make(*given, **options)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def ending(function, dies):
    def call(*arguments, **options):
        if dies(*arguments):
            os._exit(KILLED)
        return function(*arguments, **options)

    return call


def test_a_second_process_is_refused(tmp_path, source):
    rule = r"out: in use by another process\. Fix: wait until that process ends"
    first = run_stage("test", tmp_path / "out", settings={"a": 1}, inputs=[source])
    with first, pytest.raises(RankError, match=rule):
        run_on_ranks(1, make, tmp_path / "out", source, join=False)
    assert make(tmp_path / "out", source)[1] is False  # the lock is free again


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path, source):
    output = tmp_path / "out"
    output.mkdir()
    (output / "precious").write_text("data")
    rule = r"out: already exists without a manifest.json of moe-exp. Fix: choose another folder"
    for start_over in (False, True):
        refused(rule, output, source, start_over=start_over)
    assert (output / "precious").read_text() == "data"
    (output / "precious").unlink()
    make(output, source)  # an empty folder is one to fill


def test_damage_is_an_error_not_a_fresh_start(tmp_path, source):
    output, rule = tmp_path / "out", r"is damaged \(.*\). Fix: remove it, or use --start-over."
    make(output, source)
    (output / "manifest.json").write_text('{"stage": "te')
    refused(rf"manifest.json: {rule}", output, source)
    make(output, source, "new", start_over=True)
    assert made_file(output, True).read_text() == "new"
    begin(output, source, "half", settings={"a": 2}, start_over=True)
    (partial(output) / "running.json").write_text("{")
    refused(rf"running.json: {rule}", output, source)
    make(output, source, "newer", settings={"a": 2}, start_over=True)
    assert made_file(output, True).read_text() == "newer"


def test_the_order_of_inputs_counts(tmp_path, source):
    other = tmp_path / "other.jsonl"
    other.write_text("other")

    def run(inputs):
        with run_stage("test", tmp_path / "out", settings={}, inputs=inputs) as stage:
            return stage.manifest is not None or stage.finish([])

    run([source, other])
    assert run([source, other]) is True
    with pytest.raises(ValueError, match=r"was made from other inputs \(in another order\)"):
        run([other, source])
    with pytest.raises(ValueError, match=r"was made from other inputs \(other.jsonl has changed\)"):
        run([source])


def test_settings_are_compared_as_json(tmp_path, source):
    make(tmp_path / "out", source, settings={"a": (1, 2)})
    assert make(tmp_path / "out", source, settings={"a": [1, 2]})[1]


@pytest.mark.parametrize("size", [0, 1, 1000, 2**16, 2**18 + 7, 2**21])
def test_fingerprints(tmp_path, size):
    path, other = tmp_path / "a.jsonl", tmp_path / "folder/a.jsonl"
    other.parent.mkdir()
    content = bytes(number % 251 for number in range(size))
    path.write_bytes(content)
    other.write_bytes(content)
    os.utime(other, (1, 1))
    assert fingerprint(path) == fingerprint(other)
    assert fingerprint(path)["bytes"] == size
    if size:
        for place in (0, size - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            other.write_bytes(changed)
            assert fingerprint(path) != fingerprint(other)
    other.write_bytes(content + b"x")
    assert fingerprint(path) != fingerprint(other)


def test_file_hash_is_that_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_CHUNK_BYTES", 7)
    content = os.urandom(1000)
    (tmp_path / "a").write_bytes(content)
    assert file_hash(tmp_path / "a") == xxhash.xxh3_128_hexdigest(content)


def test_hashes_that_are_known_are_not_made_again(tmp_path, source):
    with run_stage("test", tmp_path / "out", settings={}, inputs=[source]) as stage:
        paths = [stage.folder / name for name in ("a", "b")]
        for path in paths:
            path.write_text("x")
        manifest = stage.finish(paths, hashes={paths[0]: "known"})
    assert [file["hash"] for file in manifest["outputs"]] == ["known", xxhash.xxh3_128_hexdigest(b"x")]


def test_json_is_written_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"é": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}


def test_free_disk(tmp_path):
    folder = tmp_path / "not/there/yet"
    check_free_disk(folder, 1000, "the test")
    with pytest.raises(ValueError, match=r"yet: has [\d.]+ [GT]B free; the test requires 1 EB. Fix: free up"):
        check_free_disk(folder, 10**18, "the test")
    assert not (tmp_path / "not").exists() and shutil.disk_usage(tmp_path).free > 1000


@BOTH_KINDS
def test_a_start_over_goes_on_without_the_flag(tmp_path, source, is_folder):
    output = tmp_path / "out"
    make(output, source, "old", is_folder=is_folder)
    for settings, old in (({"a": 1}, "old"), ({"a": 2}, "half whole")):  # the same as before, and others
        begin(output, source, "half ", settings=settings, start_over=True, is_folder=is_folder)
        assert made_file(output, is_folder).read_text() == old  # until the new is complete
        manifest, was_done = make(output, source, "whole", settings=settings, is_folder=is_folder)
        assert not was_done and manifest["settings"] == settings
        assert made_file(output, is_folder).read_text() == "half whole"
        assert make(output, source, settings=settings, is_folder=is_folder)[1] is True
    begin(output, source, "half ", settings={"a": 3}, start_over=True, is_folder=is_folder)
    assert make(output, source, settings={"a": 2}, is_folder=is_folder)[1] is True  # finds the old output
    refused("was made with a=2, not 4", output, source, settings={"a": 4}, is_folder=is_folder)
    # with the flag it begins anew
    made, _ = make(output, source, "whole", settings={"a": 3}, start_over=True, is_folder=is_folder)
    assert made_file(output, is_folder).read_text() == "whole"
    assert make(output, source, settings={"a": 3}, is_folder=is_folder) == (made, True)


@BOTH_KINDS
def test_an_input_that_changes_meanwhile(tmp_path, source, is_folder):
    rule = r"in.jsonl: changed while test was reading it. Fix: repeat the command with --start-over"
    options = {"settings": {}, "inputs": [source], "is_folder": is_folder}
    with pytest.raises(ValueError, match=rule), run_stage("test", tmp_path / "out", **options) as stage:
        source.write_text("inp\n")
        stage.finish([])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.manifest.json").exists()


def test_files_of_others_are_left_alone(tmp_path, source):
    theirs = tmp_path / "out.bin"
    theirs.write_text("precious")
    rule = r"out.bin: already exists without a manifest of moe-exp. Fix: choose another name, or use --start"
    refused(rule, tmp_path / "out", source, is_folder=False, suffixes=(".bin",))
    assert theirs.read_text() == "precious" and not partial(tmp_path / "out").exists()
    make(tmp_path / "out", source, is_folder=False, suffixes=(".bin",), start_over=True)


def test_an_output_that_is_a_link(tmp_path, source):
    (tmp_path / "disk/real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk/real")
    make(tmp_path / "out", source, "old")
    make(tmp_path / "out", source, "new", start_over=True)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/real/out.out").read_text() == "new"


def test_what_another_version_has_begun_is_not_resumed(tmp_path, source, monkeypatch):
    begin(tmp_path / "out", source)
    monkeypatch.setattr(stage_module, "_FORMAT", stage_module._FORMAT + 1)
    rule = r"out: was started by another version of moe_exp. Fix: use --start-over"
    refused(rule, tmp_path / "out", source)
    make(tmp_path / "out", source, "new", start_over=True)
    assert make(tmp_path / "out", source)[1] is True  # what is finished is finished


def test_stale(tmp_path, source):
    output = tmp_path / "out"
    assert not stage_module.is_stale(output, [source])
    make(output, source)
    assert not stage_module.is_stale(output, [source])
    source.write_text("other\n")
    assert stage_module.is_stale(output, [source])
    begin(output, source, start_over=True)
    assert not stage_module.is_stale(output, [source])  # it has only to continue


def test_another_step_is_never_replaced(tmp_path, source):
    make(tmp_path / "out", source, "precious")
    rule = r"out: was created by the step test and cannot be replaced by other. Fix: choose another output"
    with pytest.raises(ValueError, match=rule):
        run_other(tmp_path / "out", source, start_over=True)
    assert made_file(tmp_path / "out", True).read_text() == "precious"


@FORKS
def test_killed_while_new_files_get_their_places(tmp_path, source):
    """The old manifest has gone by then: it would call the new file finished, and vouch for another."""
    output = tmp_path / "out"
    make(output, source, is_folder=False)
    other = {"settings": {"a": 2}, "is_folder": False, "start_over": True}
    assert killed(lambda *paths: paths[1:] == (made_file(output, False),), output, source, "other", **other)
    assert not output.with_name("out.manifest.json").exists()


SHUFFLE = "shuffle --shards 2 --valid-fraction 0.1 --name x"
COMMANDS = [f"{SHUFFLE} --output", f"{SHUFFLE} --tasks 2 --output", "train-tokenizer --vocab-size 300 --out"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_that_a_bad_line_has_stopped_continues_with_skip_bad(command, tmp_path):
    """It makes the files of a call that skips the line from the start."""
    path, (name, *flags) = tmp_path / "a.jsonl", command.split()
    lines = [json.dumps({"text": f"document {number} of a file"}) for number in range(60)]
    path.write_text("\n".join([*lines[:30], "{broken", *lines[30:]]) + "\n")
    places = tmp_path / "resumed" / "x", tmp_path / "fresh" / "x"
    assert main(name, [str(path), *flags, str(places[0])]) == 1
    for place in places:
        assert main(name, [str(path), *flags, str(place), "--skip-bad"]) == 0
    manifests = [json.loads((place / "manifest.json").read_text()) for place in places]
    assert manifests[0]["settings"] == manifests[1]["settings"]
    assert manifests[0]["outputs"] == manifests[1]["outputs"] != []
