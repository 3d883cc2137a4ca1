from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from moe_exp.cli import main
from moe_exp.watch.excluded_nodes import exclude, read_excluded, readmit, slurm_option


def test_a_list_keeps_hosts_once_with_date_and_first_reason(tmp_path):
    path = tmp_path / "runs" / "exclude_nodes.txt"
    assert list(read_excluded(path)) == []
    assert exclude(path, "node-b", "matmul is\n  wrong")
    assert exclude(path, "node-a.cluster.org", "slow")
    assert not exclude(path, "node-b", "again")
    assert list(read_excluded(path)) == ["node-b", "node-a"]
    when, _, reason = read_excluded(path)["node-b"].partition(" ")
    assert datetime.fromisoformat(when).tzinfo and reason == "matmul is wrong"
    assert slurm_option(read_excluded(path)) == "--exclude=node-b,node-a"
    assert slurm_option([]) == ""


def test_what_people_write_stays(tmp_path):
    path = tmp_path / "list"
    path.write_text("# bad rack\n\nn1\nn2.local # fan\nn1 # twice")
    assert list(read_excluded(path)) == ["n1", "n2"]
    exclude(path, "n3", "x")
    assert path.read_text().startswith("# bad rack\n\nn1\nn2.local # fan\nn1 # twice\nn3 ")
    assert readmit(path, ["n1", "gone"]) == ["n1"]
    assert list(read_excluded(path)) == ["n2", "n3"]
    assert path.read_text().startswith("# bad rack\n\nn2.local # fan\n")
    assert readmit(path, ["n2"]) == ["n2"]  # written with its domain
    assert list(read_excluded(path)) == ["n3"]
    assert readmit(tmp_path / "none", ["n1"]) == []


def test_what_is_no_host_name_is_refused(tmp_path):
    for host in ("", "a b", "a,b", "$(reboot)", "--exclude=x", "n1;ls", "-n"):
        with pytest.raises(ValueError, match="is not a host name"):
            exclude(tmp_path / "list", host, "x")
    assert not (tmp_path / "list").exists()
    (tmp_path / "list").write_text("n1\nn2 and n3\n")
    with pytest.raises(ValueError, match=r"line 2: 'n2 and n3' is not a host name"):
        read_excluded(tmp_path / "list")


def test_nobody_gets_lost_when_many_add_at_once(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: exclude(tmp_path / "list", f"n{number}", "x"), range(24)))
    assert sorted(read_excluded(tmp_path / "list")) == sorted(f"n{number}" for number in range(24))


def test_command(tmp_path, capsys):
    path = str(tmp_path / "list")
    assert main(["watch", "exclude", path, "--add", "a", "b", "--reason", "fan"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]
    assert main(["watch", "exclude", path, "--remove", "a", "--slurm"]) == 0
    assert capsys.readouterr().out == "--exclude=b\n"
    assert main(["watch", "exclude", path, "--remove", "nosuch"]) == 0
    assert f"--remove=nosuch: not found in {path}. Fix: " in capsys.readouterr().err
    assert main(["watch", "exclude", path, "--add", "a b"]) == 1
    assert main(["watch", "exclude", path, "--add", "c", "--remove", "c"]) == 1
    assert list(read_excluded(tmp_path / "list")) == ["b"]
