"""--config and --resume: which value wins, what is taken over, and one line for what cannot be read."""

import re
from pathlib import Path

import pytest

from moe_exp.config import Config, ConfigError, load_config, to_yaml
from moe_exp.config.loading import settings_from_launcher, with_file
from moe_exp.config.settings_file import NOT_TAKEN_OVER, read_settings
from moe_exp.host.exit_codes import EXIT_CODE_FILE, RESOLVED_SETTINGS
from moe_exp.launch.launch import train, with_run_folder, without_usual


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder of its own, and no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    for name in Config.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def written(text: str, name: str = "exp.yaml") -> str:
    Path(name).write_text(text)
    return name


def run_of(config: Config, folder: str = "runs/A") -> Path:
    """A run folder that has only its settings."""
    Path(folder).mkdir(parents=True)
    path = Path(folder) / "config.yaml"
    path.write_text(to_yaml(config))
    return path


@pytest.mark.parametrize(
    ("flag", "variable", "in_file", "expected"),
    [
        ("8", "6", "5", 8),
        (None, "6", "5", 6),
        (None, "", "5", 5),
        (None, None, None, 4),  # the preset's; 24 without any
        ("8", None, "5", 8),
    ],
)
def test_order_is_flag_environment_file_preset(flag, variable, in_file, expected):
    assert Config(gpus_per_node=1).num_layers == 24
    lines = "preset: cpu\n" + (f"num_layers: {in_file}\n" if in_file else "")
    environ = {"NUM_LAYERS": variable} if variable is not None else {}
    flags = {"config": written(lines), "num_layers": flag}
    config = load_config(flags, environ)
    assert (config.num_layers, config.preset) == (expected, "cpu")
    again = load_config(with_file(flags, environ), environ)  # as the ranks resolve it
    assert again == config


def test_formats_and_values():
    lines = [
        "# a comment", "NUM_EXPERTS: 16", "topk: 2", "vpp: null", "lr: 1e-4", "run_name: 007",
        "use_moe: yes", "overlap: true", "moe_layer_freq: '[0]*2+[1]*2'", "tokenizer:", "hang_timeout_other:",
    ]  # fmt: skip
    values = read_settings(Path(written("\n".join(lines))))
    assert values["run_name"] == "007" and "tokenizer" not in values and values["vpp"] == "none"
    config = load_config({"config": "exp.yaml", "preset": "cpu"}, {})
    assert (config.num_experts, config.topk, config.lr, config.use_moe) == (16, 2, 1e-4, True)
    assert config.overlap == "true" and config.hang_timeout_other is None
    env = "export EP=2 ETP='1'  # both\nRUN_NAME='a $b'\r\nTOKENIZER=\n\nTP=\"4\"\n"
    values = read_settings(Path(written(env, "x.env")))
    assert values == {"ep": "2", "etp": "1", "run_name": "a $b", "tp": "4"}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("NUM_EXPRTS=8\nFOO=1", ["exp.yaml: NUM_EXPRTS=8: .* NUM_EXPERTS", "exp.yaml: FOO=1: .* remove"]),
        ("learning_rate: 1", ["exp.yaml: LEARNING_RATE=1: is not .* Fix: write LR or MIN_LR "]),
        (
            "topk: many",
            ["exp.yaml: TOPK=many: must be a valid integer. Fix: correct TOPK: experts per token."],
        ),
        ("preset: cpuu", ["exp.yaml: PRESET=cpuu: unknown preset. Fix: use one of reference, cpu, "]),
        ("lr: 1\nLR: 2", ["exp.yaml: LR=2: is in the file twice. Fix: remove one of the two lines."]),
        (
            "",
            ["CONFIG=exp.yaml: cannot be read .it contains no settings.. Fix: specify config.yaml of a run"],
        ),
        ("just text", ["CONFIG=exp.yaml: cannot be read .it contains no settings.. Fix: "]),
        ("lr: [1, 2]", ["CONFIG=exp.yaml: cannot be read .line 1: must be one name and one value; "]),
        ("a: 1\nb: [0]*3", ["CONFIG=exp.yaml: cannot be read .line 2: .* needs quotes"]),
        ("TP=1\nfoo", ["CONFIG=exp.yaml: cannot be read .line 2: foo is not NAME=value"]),
        ("TP='1", ["CONFIG=exp.yaml: cannot be read .line 1: No closing quotation"]),
        ("RUN_DIR=$HOME/x", ["CONFIG=exp.yaml: cannot be read .line 1: variables are not expanded; "]),
        (None, ["CONFIG=exp.yaml: not found. Fix: specify config.yaml of a run, or a file "]),
    ],
)
def test_files_that_cannot_be_read(text, lines, capsys):
    if text is not None:
        written(text)
    assert train({"config": "exp.yaml"}) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(lines), printed
    for line, expected in zip(printed, lines, strict=True):
        assert re.match(f"moe-exp: {expected}", line), line


def test_other_files():
    Path("folder").mkdir()
    Path("binary").write_bytes(b"\xff\xfe\x00")
    Path("large").write_bytes(b"#" * 2**21)
    for name in ("folder", "binary", "large"):
        with pytest.raises(ConfigError, match=rf"^CONFIG={name}: cannot be read \(.*\)\. Fix: "):
            load_config({"config": name}, {})


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "cpu"},
        {"preset": "deepseek-v3-like", "rampup_batch_size": "", "gpus_per_node": 8, "lr": 1.1e-5},
        {"preset": "cpu", "train_iters": 1000, "vpp": 2, "hang_timeout_other": "none", "use_moe": False},
    ],
)
def test_config_yaml_gives_an_equal_config(settings):
    places = {"run_name": "A", "node_rank": 3, "master_addr": "node0", "run_dir": "elsewhere"}
    config = load_config(settings | places, {})
    path = run_of(config)
    again = load_config({"config": str(path)}, {})
    assert again.run_dir == "elsewhere"
    same = {name: getattr(config, name) for name in NOT_TAKEN_OVER}
    assert again.model_copy(update=same) == config
    assert all(getattr(again, name) == Config.model_fields[name].default for name in NOT_TAKEN_OVER)
    assert load_config({"config": "runs/A"}, {}) == again


def test_settings_of_an_older_run_that_are_gone():
    """Left out where they say what happens without them, else refused."""
    gone = "attention_flops: causal\nphi_balancing_rate: 0.3\nrouter_bias_decay: 0.0\n"
    assert read_settings(Path(written(gone + "lr: 1e-4"))) == {"lr": "1e-4"}
    with pytest.raises(ConfigError, match=r"ROUTER_BIAS_DECAY=0\.05: was removed in this version"):
        read_settings(Path(written("router_bias_decay: 0.05")))


def test_what_followed_train_iters_follows_another_one():
    path = run_of(load_config({"preset": "cpu", "train_iters": 100}, {}))
    typed = load_config({"preset": "cpu", "train_iters": 900}, {})
    again = load_config({"config": str(path), "train_iters": 900}, {})
    assert (again.decay_iters, again.warmup_iters) == (typed.decay_iters, typed.warmup_iters)
    path = run_of(load_config({"preset": "cpu", "train_iters": 100, "decay_iters": 90}, {}), "runs/B")
    assert load_config({"config": str(path), "train_iters": 900}, {}).decay_iters == 90


def test_a_new_run_does_not_continue_the_run_of_its_file(capsys):
    run_of(load_config({"preset": "cpu", "gpus_per_node": 1, "run_name": "A"}, {}))
    assert train({"config": "runs/A", "run_name": "A"}, dry_run=True) == 2
    assert re.match(r"moe-exp: CONFIG=runs/A: .* Fix: .* --resume runs/A\.\n", capsys.readouterr().err)
    assert train({"config": "runs/A"}, dry_run=True) == 0
    assert "run folder: runs/moe_true_num_experts_64_" in capsys.readouterr().out
    assert train({"config": "runs/A", "preset": "reference"}, dry_run=True) == 2
    assert (
        "PRESET=reference: has no effect, as runs/A/config.yaml sets all settings of a run"
        in capsys.readouterr().err
    )


def test_resume_is_settings_and_folder(capsys, monkeypatch):
    config = load_config({"preset": "cpu", "gpus_per_node": 1, "run_name": "a/B", "num_layers": 2}, {})
    run_of(config, "runs/a/B")
    monkeypatch.setenv("RUN_NAME", "other")
    flags = with_run_folder({"lr": "0.01"}, "runs/a/B/")
    assert load_config(flags) == config.model_copy(update={"lr": 0.01})
    assert train({"lr": "0.01"}, resume="runs/a/B", dry_run=True) == 0
    out = capsys.readouterr().out
    for line in ("LR=0.01 +# command line", "NUM_LAYERS=2 +# runs/a/B/config.yaml", "run folder: runs/a/B"):
        assert re.search(f"^{line}$", out, re.M), line
    (command,) = (line for line in out.splitlines() if "moe_exp.launch.agent" in line)
    assert "--num-layers=2" in command and "--config" not in command and "--hidden-size" not in command


@pytest.mark.parametrize(
    ("folder", "flags", "line"),
    [
        ("runs/B", {}, "RESUME=runs/B: is not a run folder .*config.yaml.*Fix: .* --resume runs/NAME."),
        ("runs/A/checkpoints", {}, "RESUME=runs/A/checkpoints: is not a run folder .* --resume runs/A."),
        ("runs/A", {"run_name": "C"}, "RUN_NAME=C: --resume runs/A already sets the settings .* Fix: .*"),
        ("runs/A", {"config": "x"}, "CONFIG=x: --resume runs/A already sets the settings .* Fix: .*"),
    ],
)
def test_folders_that_cannot_be_resumed(folder, flags, line, capsys):
    run_of(load_config({"preset": "cpu"}, {}))
    assert train(flags, resume=folder) == 2
    assert re.fullmatch(f"moe-exp: {line}\n", capsys.readouterr().err)


def test_ranks_take_what_their_launcher_has_resolved(monkeypatch):
    """Whatever their environment and files say by then; without a launcher they resolve it themselves."""
    config = load_config({"config": written("num_experts: 16\nvpp: 2\n"), "preset": "cpu", "lr": "1e-5"}, {})
    monkeypatch.setenv("NUM_EXPERTS", "4")
    Path("settings.json").write_text("{}")  # of another program
    assert settings_from_launcher() is None
    Path("launched").mkdir()
    monkeypatch.setenv(EXIT_CODE_FILE, str(Path("launched", "exit_code").absolute()))
    assert settings_from_launcher() is None
    Path("launched", RESOLVED_SETTINGS).write_text(config.model_dump_json())
    assert settings_from_launcher() == config


@pytest.mark.parametrize("settings", [
    {"train_iters": 5000, "warmup_iters": 1000}, {"train_iters": 39000, "decay_iters": 38000},
    {"vocab_size": 128256},
])  # fmt: skip
def test_ranks_get_what_equals_the_preset_but_would_follow_others(settings):
    """Of a settings file, and of a run that continues."""
    expected = load_config({"preset": "reference", **settings}, {})
    usual = load_config({"preset": "reference"}, {}).model_dump()
    assert any(usual[name] == value for name, value in settings.items())
    lines = [f"{name}: {value}\n" for name, value in {"preset": "reference", **settings}.items()]
    file = written("".join(lines))
    for path in (file, str(run_of(expected))):
        given = with_file({"config": path}, {})
        for_ranks = without_usual(load_config(given, {}), given, list(given))
        found = load_config(for_ranks, {})
        assert {name: getattr(found, name) for name in settings} == settings
        assert set(settings) <= set(for_ranks) and "hidden_size" not in for_ranks


def test_a_variable_that_wins_over_the_file_is_named(capsys):
    environ = {"TP": "2", "EP": "4", "CP": "1"}
    config = load_config({"config": written("TP=1\nEP=4\nCP=2\nPP=2\n"), "cp": "4"}, environ)
    assert (config.tp, config.ep, config.cp, config.pp) == (2, 4, 4, 2)
    line = "moe-exp: warning: TP=2 in the environment overrides exp.yaml\n"
    assert capsys.readouterr().err == line
