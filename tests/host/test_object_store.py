"""Files at an object store: moto's S3 server, whose requests fail now and then."""

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

from moe_exp.host import object_store
from moe_exp.host.object_store import Store, StoredFile, fetch, send

ROOT_URL = "s3://bucket"


def silent(*_):
    pass


def test_files_there(url):
    store = Store(url)
    assert store.files() == {} and store.find("a") is None
    store.write("a", b"abcdef")
    store.write("b/c", b"")
    assert {name: file.bytes for name, file in store.files().items()} == {"a": 6, "b/c": 0}
    assert store.read("a") == b"abcdef" and store.read("a", 2, 4) == b"cd"
    before = store.find("a").version
    store.write("a", b"ABCDEF")
    assert store.find("a").version != before
    store.remove("a")
    store.remove("a")
    assert list(store.files()) == ["b/c"]
    with pytest.raises(FileNotFoundError):
        store.read("a")
    # a name that begins like the folder's is none of its files
    Store(f"{url}2").write("x", b"1")
    assert list(store.files()) == ["b/c"]


def test_a_third_of_the_requests_fail_and_all_bytes_arrive(server, url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_PART_BYTES", 100_000)
    data = {f"d/{n}": np.random.default_rng(n).bytes(150_000 * n) for n in range(4)}
    (tmp_path / "d").mkdir()
    for name, content in data.items():
        (tmp_path / name).write_bytes(content)
    files = {name: tmp_path / name for name in data}
    server.fail(1 / 3)
    assert send(Store(url), files, "manifest.json", b"{}", silent)
    listed = Store(url).files()
    assert set(listed) == {*data, "manifest.json"}
    fetch(Store(url), {name: listed[name] for name in data}, tmp_path / "back", silent)
    assert {name: (tmp_path / "back" / name).read_bytes() for name in data} == data
    counts = server.counts()
    assert counts["failed"] > 5 and counts["failed"] < counts["requests"]


def test_a_download_goes_on_where_it_stopped(url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_PART_BYTES", 1000)
    store, content = Store(url), np.random.default_rng(0).bytes(5500)
    store.write("a", content)
    asked, read = [], Store.read

    def read_and_stop(self, name, start=0, end=None):
        asked.append(start)
        if start == 3000 and asked.count(3000) == 1:
            raise KeyboardInterrupt
        return read(self, name, start, end)

    monkeypatch.setattr(Store, "read", read_and_stop)
    with pytest.raises(KeyboardInterrupt):
        store.download("a", tmp_path / "a", store.find("a"), silent)
    assert not (tmp_path / "a").exists()
    store.download("a", tmp_path / "a", store.find("a"), silent)
    assert asked == [0, 1000, 2000, 3000, 3000, 4000, 5000]
    assert (tmp_path / "a").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    # of another version nothing is used
    (tmp_path / "a").unlink()
    asked.clear()
    monkeypatch.setattr(Store, "read", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.download("a", tmp_path / "a", StoredFile(5500, "other"), silent)


def test_what_a_stopped_copy_has_sent_is_not_complete_and_not_sent_again(url, tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / name).write_text(name)
    files, store, sent, upload = {name: tmp_path / name for name in "abc"}, Store(url), [], Store.upload

    def upload_all(self, path, name):
        sent.append(name)
        upload(self, path, name)

    def upload_or_stop(self, path, name):
        if name == "c":
            raise KeyboardInterrupt
        upload_all(self, path, name)

    monkeypatch.setattr(object_store, "_WORKERS", 1)
    monkeypatch.setattr(Store, "upload", upload_or_stop)
    with pytest.raises(KeyboardInterrupt):
        send(store, files, "manifest.json", b"1", silent)
    assert "manifest.json" not in store.files() and sent == ["a", "b"]
    monkeypatch.setattr(Store, "upload", upload_all)
    assert send(store, files, "manifest.json", b"1", silent)
    assert sent == ["a", "b", "c"] and set(store.files()) == {"a", "b", "c", "manifest.json"}
    assert not send(store, files, "manifest.json", b"1", silent)
    # files of the same sizes and another content have another manifest: all are sent
    (tmp_path / "a").write_text("A")
    assert send(store, files, "manifest.json", b"2", silent)
    assert sent[3:] == ["a", "b", "c"] and store.read("a") == b"A" and store.read("manifest.json") == b"2"
    # stopped while it replaces files of the same sizes: none of the old ones counts as sent
    for name in "abc":
        (tmp_path / name).write_text(name.upper() if name != "a" else "x")
    monkeypatch.setattr(Store, "upload", upload_or_stop)
    with pytest.raises(KeyboardInterrupt):
        send(store, files, "manifest.json", b"3", silent)
    monkeypatch.setattr(Store, "upload", upload_all)
    del sent[:]
    assert send(store, files, "manifest.json", b"3", silent) and sent == ["c"]
    assert [store.read(name) for name in "abc"] == [b"x", b"B", b"C"]
    # a file that has gone from there
    store.remove("b")
    assert send(store, files, "manifest.json", b"3", silent) and sent[1:] == ["b"]


@pytest.mark.parametrize(
    ("place", "variables", "line"),
    [
        ("abc://b/x", {}, "Protocol not known: abc. Fix: give an s3://, gs:// or hf:// URL."),
        (f"{ROOT_URL}x/y", {}, "bucket not found. Fix: create it, or correct the URL."),
        ("s3://no bucket/x", {}, "Fix: check the URL, the region and the store's Python package."),
        (f"{ROOT_URL}/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "_ENDPOINT_URL), then try again."),
    ],
)
def test_errors_are_one_line_with_a_fix(server, place, variables, line, monkeypatch):
    import s3fs

    monkeypatch.setattr("time.sleep", silent)
    monkeypatch.setattr(object_store, "_reached", set())
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises((ValueError, ConnectionError)) as caught:
        Store(place).write("a", b"1")
    s3fs.S3FileSystem.clear_instance_cache()
    assert str(caught.value).endswith(line) and "\n" not in str(caught.value)


def test_a_file_that_changes_while_it_is_read_is_not_a_mixture_of_both(url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "_PART_BYTES", 1000)
    store, read = Store(url), Store.read
    store.write("a", b"1" * 5000)
    known = store.find("a")

    def read_and_change(self, name, start=0, end=None):
        if start == 4000:
            store.write("a", b"2" * 5000)
        return read(self, name, start, end)

    monkeypatch.setattr(Store, "read", read_and_change)
    with pytest.raises(ConnectionError, match=r"the file changed during the download\. Fix: "):
        store.download("a", tmp_path / "a", known, silent)
    assert not list(tmp_path.iterdir())
