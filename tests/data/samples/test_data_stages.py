"""DATA_STAGES: samples of one stage after the other, and what a run makes of them."""

import json
import re
import shlex
from collections import Counter

import pytest
import torch

from helpers import ROOT
from helpers.token_files import write_distinct, write_tokens
from moe_exp import cli
from moe_exp.config import ConfigError, load_config
from moe_exp.config.parsers import read_stages
from moe_exp.data.samples.dataset import SampleStream, blend_counts, blend_position
from moe_exp.launch.machine_checks import data_problems
from moe_exp.launch.source_checks import source_problems

SEQ_LEN = 8


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> dict[str, str]:
    """Three files whose tokens are all different."""
    folder = tmp_path_factory.mktemp("stages")
    files = {"a": (120, 1), "b": (90, 1441), "c": (60, 2521)}
    return {name: write_distinct(folder / name, [13] * num, first) for name, (num, first) in files.items()}


def staged(prefixes, *stages) -> SampleStream:
    """Stages of (first sample, blend, seq_len)."""
    named = [(first, [(w, prefixes[n]) for w, n in blend], seq_len) for first, blend, seq_len in stages]
    samples = SampleStream(named[0][1], seq_len=named[0][2], seed=1)
    for first, blend, seq_len in named[1:]:
        samples.add_stage(blend, seq_len=seq_len, first_sample=first)
    return samples


@pytest.mark.parametrize("weights", [[1], [1, 1], [3, 1, 2], [5, 1, 1, 7, 2]])
def test_blend_counts_are_those_of_the_positions(weights):
    sums = [0]
    for weight in weights:
        sums.append(sums[-1] + weight)
    for count in (0, 1, 7, 100):
        places = Counter(blend_position(index, sums)[0] for index in range(count))
        assert blend_counts(count, sums) == [places[position] for position in range(len(weights))]


def test_files_go_on_over_a_border(prefixes):
    """Other weights, one file less and one more: in an epoch of each no input is read twice or left out."""
    ab, bc = [(0.5, "a"), (0.5, "b")], [(0.25, "b"), (0.75, "c")]
    samples = staged(prefixes, (0, ab, SEQ_LEN), (64, bc, SEQ_LEN), (128, ab, SEQ_LEN))
    tokens = samples.batch(0, 64), samples.batch(64, 64), samples.batch(128, 64)
    inputs = [int(token) for part in tokens for token in part[:, :-1].flatten() if token]
    assert len(inputs) == len(set(inputs))
    alone = SampleStream([(1.0, prefixes["a"])], seq_len=SEQ_LEN, seed=1)
    of_a = alone.batch(0, 64).tolist()
    assert [row for part in (tokens[0], tokens[2]) for row in part.tolist() if row in of_a] == of_a


def test_the_past_does_not_depend_on_what_comes(prefixes):
    ab, c = [(0.5, "a"), (0.5, "b")], [(1.0, "c")]
    one = staged(prefixes, (0, ab, SEQ_LEN), (64, c, SEQ_LEN))
    two = staged(prefixes, (0, ab, SEQ_LEN), (64, c, SEQ_LEN), (80, ab, 2 * SEQ_LEN))
    plain = SampleStream([(0.5, prefixes["a"]), (0.5, prefixes["b"])], seq_len=SEQ_LEN, seed=1)
    assert torch.equal(one.batch(0, 64), plain.batch(0, 64))
    assert torch.equal(one.batch(64, 16), two.batch(64, 16))


def test_longer_samples_count_as_several(prefixes):
    samples = staged(prefixes, (0, [(1.0, "a")], SEQ_LEN), (32, [(1.0, "b")], 4 * SEQ_LEN))
    assert [samples.stage_at(index).seq_len for index in (0, 31, 32, 40)] == [8, 8, 32, 32]
    assert samples.batch(28, 4).shape == (4, 9)
    long = samples.batch(32, 8)
    assert long.shape == (2, 33)
    assert torch.equal(long, torch.cat([samples.batch(32, 4), samples.batch(36, 4)]))
    assert [samples.origin(index).prefix for index in (31, 35)] == [prefixes["a"], prefixes["b"]]
    for first, count in ((33, 4), (32, 3), (28, 8)):
        with pytest.raises(ValueError, match=r"must be whole samples of one stage\. Fix: "):
            samples.batch(first, count)


def config(stages, **changes):
    settings = {"preset": "cpu", "gpus_per_node": 1, "seq_len": 64, "mbsz": 2, "gbsz": 8, "train_iters": 100}
    text = stages if isinstance(stages, str) else json.dumps(stages)
    return load_config(settings | {"data_stages": text} | changes, {})


def test_a_file_and_text_are_the_same(tmp_path):
    file = tmp_path / "stages.yaml"
    file.write_text("- from_tokens: 4e4\n  seq_len: 128\n- from_samples: 800\n  train_data: 0.5 a 0.5 b\n")
    found = config(str(file), train_data="x")
    text = "[{from_tokens: 4e4, seq_len: 128}, {from_samples: 800, train_data: 0.5 a 0.5 b}]"
    assert found.data_stages == config(text, train_data="x").data_stages
    stages = [tuple(vars(stage).values()) for stage in found.stages]
    assert stages == [(0, "x", 64, None), (625, "x", 128, 40000), (800, "0.5 a 0.5 b", 128, None)]
    assert read_stages(found.data_stages) == found.data_stages


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("gone.yaml", "cannot be read as a file (No such file or directory)"),
        ("~no_such_user/x", "cannot be read as a file (No such file or directory)"),
        ("/dev/null", "cannot be read as a file (is not a regular file)"),
        ("[", "is not YAML"),
        ("{a: 1}", "must be a list of stages"),
        ("[{train_data: a}]", "stage 1 must have either from_samples or from_tokens"),
        ("[{from_samples: 8, from_tokens: 8, seq_len: 8}]", "stage 1 must have either"),
        ("[{from_samples: 8}]", "stage 1 changes nothing: add train_data or seq_len"),
        ("[{from_samples: 8, weights: 1}]", "stage 1 has an unknown key 'weights'"),
        ("[{from_samples: -8, seq_len: 8}]", "from_samples=-8 must be a whole number of at least 1"),
        ("[{from_samples: 8.5, seq_len: 8}]", "from_samples=8.5 must be a whole number"),
        (
            "[{from_samples: 8, train_data: 3}]",
            "stage 1: train_data must be a non-empty string in the format of TRAIN_DATA",
        ),
    ],
)
def test_what_cannot_be_read(text, rule):
    with pytest.raises(ConfigError, match=f"^DATA_STAGES=.*{re.escape(rule)}"):
        config(text)


IN_ORDER, WITHIN = "put the stages in order, at least a batch apart", "start the stage earlier"
VPP = {"pp": 2, "vpp": 2, "num_layers": 4, "gpus_per_node": 2, "mbsz": 1, "gbsz": 4}
STEPS = {"rampup_batch_size": "4 2 40", "mbsz": 1, "gpus_per_node": 2, "gbsz": 8}
OF_MEGATRON = {"data_order": "megatron", "train_data": "a"}


@pytest.mark.parametrize(
    ("stages", "changes", "rule", "fix"),
    [
        ("{from_samples: 80, seq_len: 128}, {from_samples: 80, train_data: a}", {},
            "stage 2 begins at sample 80, but the previous stage at sample 80", IN_ORDER),
        # in one batch of 8 samples
        ("{from_tokens: 5200, seq_len: 128}, {from_tokens: 5300, train_data: a}", {},
            "stage 2 begins at token 5300, but the previous stage at token 5200", IN_ORDER),
        ("{from_tokens: 52000, train_data: a}", {},
            "stage 1 begins at token 52000, but the run ends after 51200 tokens", WITHIN),
        ("{from_samples: 800, train_data: a}", {},
            "stage 1 begins at sample 800, but the run ends after 800 samples", WITHIN),
        ("{from_samples: 80, seq_len: 100}", {}, "seq_len=100, which must be a multiple of SEQ_LEN=64",
            "set seq_len to 64 or 128"),
        ("{from_samples: 80, seq_len: 192}", {},
            "counts as 3 samples of SEQ_LEN, but a batch of 8 is not a multiple of the 3 samples per "
            "micro-batch times DP=1",
            "set GBSZ to a multiple of 3, or MBSZ to a multiple of 3"),
        # of the ramp's batches after the stage begins, 4, 6 and 8, one is no multiple
        ("{from_samples: 8, seq_len: 128}", STEPS,
            "counts as 2 samples of SEQ_LEN, but a batch of 6 is not a multiple of the 2 samples per "
            "micro-batch times DP=2",
            "use multiples of 4 for all steps of RAMPUP_BATCH_SIZE"),
        ("{from_samples: 80, seq_len: 256}", VPP,
            "a batch of 4 is not a multiple of the 4 samples per micro-batch times DP=1 times PP=2 (VPP)",
            "set GBSZ to a multiple of 8"),
        ("{from_samples: 80, train_data: a}", OF_MEGATRON, "cannot be combined with DATA_ORDER=megatron",
            "set DATA_ORDER=stream"),
    ],
)  # fmt: skip
def test_stages_that_cannot_run(stages, changes, rule, fix):
    problems = list(config(f"[{stages}]", **changes).problems())
    (line,) = [one for one in problems if one.startswith("DATA_STAGES=")]
    assert rule in line and f"Fix: {fix}" in line


RAMP = {"rampup_batch_size": "16 16 400", "gbsz": 64, "train_iters": 400}


@pytest.mark.parametrize(
    ("begins", "changes", "consumed", "skipped", "fits"),
    [
        ([84], {}, 0, [], "80 or 88"),
        ([80, 84], {}, 0, [], "88"),  # shorter than a batch
        ([32], {"rampup_batch_size": "2 2 20"}, 0, [], "30 or 38"),
        # another GBSZ since sample 320
        ([960], {"gbsz": 48, "train_iters": 400}, 320, [], "944 or 992"),
        ([992], {"gbsz": 48, "train_iters": 400}, 320, [], ""),
        ([320], {"gbsz": 48, "train_iters": 400}, 320, [], ""),
        ([100], {"gbsz": 48, "train_iters": 400}, 320, [], ""),  # has begun
        # a batch of the ramp is skipped, before and after the place where the run continues
        ([864], RAMP, 0, [], ""),
        ([864], RAMP, 16, [(16, 48)], "832 or 896"),
        ([896], RAMP, 16, [(16, 48)], ""),
        ([864], RAMP, 0, [(480, 544)], ""),
        ([500], RAMP, 0, [(480, 544)], ""),
    ],
)
def test_stages_begin_with_a_batch(begins, changes, consumed, skipped, fits):
    stages = [{"from_samples": first, "train_data": "a"} for first in begins]
    found = list(config(stages, **changes).stage_begin_problems(consumed, skipped))
    rule = f"stage {len(begins)} begins at sample {begins[-1]}, which is inside a batch"
    expected = [f"{rule}. Fix: start the stage at sample {fits}."] if fits else []
    assert [line.partition("]: ")[2] for line in found] == expected


@pytest.mark.parametrize(
    ("tokens", "changes", "consumed", "skipped", "begun", "first"),
    [  # SEQ_LEN=64, GBSZ=8
        (64 * 80, {}, 0, [], [], 80),
        (64 * 80 + 1, {}, 0, [], [], 88),
        (64 * 73, {}, 0, [], [], 80),
        (64 * 31, {"rampup_batch_size": "2 2 20"}, 0, [], [], 38),
        # another GBSZ since sample 320: batches of 48 from there on
        (64 * 400, {"gbsz": 48, "train_iters": 400}, 320, [], [], 416),
        (6400, {"gbsz": 48, "train_iters": 400}, 320, [], [{"from_tokens": 6400, "first_sample": 104}], 104),
        # the 40 samples from 16 on are skipped, so batches after them begin at 64, 72, ...
        (64 * 61, {}, 16, [(16, 56)], [], 64),
        (64 * 61, {}, 16, [(16, 57)], [], 65),
    ],
)
def test_a_stage_in_tokens_begins_with_the_next_batch(tokens, changes, consumed, skipped, begun, first):
    stages = [{"from_tokens": tokens, "train_data": "a"}]
    found, lines = config(stages, **changes).with_stage_begins(consumed, skipped, begun)
    assert found.stages[1].first_sample == first
    assert len(lines) == (first * 64 != tokens)
    assert list(found.stage_begin_problems(consumed, skipped)) == []
    assert found.with_stage_begins(consumed, skipped, begun)[0] == found


def test_stages_that_can_run():
    stages = [{"from_samples": 80, "seq_len": 512}, {"from_tokens": 64 * 400, "train_data": "a"}]
    assert list(config(stages).problems()) == []
    assert list(config(stages, gpus_per_node=4, gbsz=16, mbsz=8, tp=2).problems()) == []


def test_files_of_a_stage_are_checked_before_the_start(prefixes, tmp_path):
    short = write_tokens(tmp_path / "short", [range(39)], eod_id=5)
    given = enumerate(("gone", str(short), prefixes["a"]), 1)
    stages = [{"from_samples": 8 * number, "train_data": path, "seq_len": 64} for number, path in given]
    found = list(data_problems(config(stages, train_data=prefixes["a"], vocab_size=60000)))
    assert [line.partition(":")[0] for line in found] == ["DATA_STAGES=gone", f"DATA_STAGES={short}"]
    assert "not found" in found[0]
    assert "has 40 tokens for training, but a sample needs SEQ_LEN + 1 = 65" in found[1]
    masked = {"train_data": prefixes["a"], "vocab_size": 60000, "document_mask": True, "seq_len": 32}
    assert list(data_problems(config(stages[2:], **masked))) == []
    inside = [stages[2] | {"from_samples": 20, "seq_len": 32}]
    (line,) = source_problems(config(inside, run_dir=str(tmp_path), **masked))
    assert "begins at sample 20, which is inside a batch" in line
    (line,) = data_problems(config([stages[1] | {"seq_len": 32}], **masked))
    assert "documents end with different tokens: 0 in" in line


@pytest.fixture(scope="module")
def settings(prefixes, tmp_path_factory):
    stages = [
        {"from_samples": 24, "train_data": f"0.3 {prefixes['b']} 0.7 {prefixes['c']}"},
        {"from_samples": 48, "train_data": prefixes["a"], "seq_len": 64},
    ]
    return {
        "TRAIN_DATA": f"0.5 {prefixes['a']} 0.5 {prefixes['b']}", "SEQ_LEN": 32, "VOCAB_SIZE": 4096,
        "MBSZ": 2, "GBSZ": 8, "TRAIN_ITERS": 10, "DATA_STAGES": json.dumps(stages),
        "DATA_DIR": tmp_path_factory.mktemp("data"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(settings, session_runs):
    return session_runs.succeed("stages", **settings)


def test_stages_begin_where_they_say(whole):
    assert whole.curve("consumed_samples") == list(range(8, 88, 8))
    assert whole.curve("consumed_tokens") == list(range(256, 2816, 256))
    assert [begun[:3] for begun in stages_begun(whole)] == [(4, 1, 32), (7, 2, 64)]


def stages_begun(ended):
    events = (one for one in ended.records("event") if one["event"] == "data_stage")
    return [(one["iteration"], one["stage"], one["seq_len"], one["train_data"]) for one in events]


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [2, 3, 4, 6, 8])
def test_resumed_on_both_sides_of_a_border(iterations, whole, settings, runs):
    """Borders are after 3 and 6 iterations. On the same layout, with workers, and on two ranks."""
    for name in ("one", "two"):
        runs.stopped(name, EXIT_INTERVAL=iterations, **settings)
    resumed = runs.succeed("one", NUM_WORKERS=1, **settings)
    for name in ("lm_loss", "grad_norm", "consumed_flops"):
        assert resumed.curve(name) == whole.curve(name), name
    two = runs.succeed("two", GPUS_PER_NODE=2, EP=2, NUM_WORKERS=1, **settings)
    assert len(two.records()) == 10
    assert two.curve("lm_loss") == pytest.approx(whole.curve("lm_loss"), rel=1e-6)


def test_a_past_stage_is_kept_and_a_future_one_may_change(prefixes, whole, settings, runs):
    runs.stopped("past", EXIT_INTERVAL=5, **settings)
    stages = json.loads(settings["DATA_STAGES"])
    stages[0]["train_data"] = prefixes["c"]
    refused = runs.run("past", **settings | {"DATA_STAGES": json.dumps(stages)})
    assert refused.code == 2
    assert "stage 1 began before sample 40" in refused.text
    assert "Fix: restore the old stage" in refused.text
    stages = json.loads(settings["DATA_STAGES"])
    stages[1] = {"from_samples": 56, "train_data": prefixes["b"]}
    other = runs.succeed("past", **settings | {"DATA_STAGES": json.dumps(stages)})
    assert other.curve("lm_loss")[:6] == whole.curve("lm_loss")[:6]
    assert other.curve("lm_loss")[7] != whole.curve("lm_loss")[7]


@pytest.mark.slow
def test_the_example_of_the_page_runs(runs, tmp_path, monkeypatch):
    """Of docs/corpus.md, on texts of the names that it has, with a thousandth of its tokens."""
    monkeypatch.chdir(tmp_path)
    section = (ROOT / "docs" / "corpus.md").read_text().split("### Stages\n")[1]
    (yaml_text,) = re.findall(r"```yaml\n# stages.yaml\n(.*?)```", section, flags=re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", section.split("DATA_ORDER=megatron")[0], flags=re.DOTALL)
    train_tokenizer, command = commands.strip().splitlines()
    for number, name in enumerate(("web", "books", "good")):
        (tmp_path / name).mkdir()
        for text in range(30):
            words = " ".join(f"{name}{(text * word + number) % 97}" for word in range(120))
            (tmp_path / name / f"{text}.txt").write_text(f"{words}.\n")
    assert cli.main(train_tokenizer.split()[1:]) == 0
    words = shlex.split(command)
    settings = dict(word.split("=", 1) for word in words[: words.index("bash")] if "PRESET" not in word)
    settings |= {"DATA_DIR": tmp_path / "data", "TOKENIZER": tmp_path / "tokenizer"}
    settings |= {"TRAIN_DATA": f"0.9 {tmp_path}/web 0.1 {tmp_path}/books"}
    stages = re.sub("(web|books|good)", rf"{tmp_path}/\1", yaml_text.replace("e6", "e3").replace("512", "32"))
    (tmp_path / "stages.yaml").write_text(stages)
    settings |= {"SEQ_LEN": 16, "MBSZ": 2, "GBSZ": 8, "TRAIN_ITERS": 60, "VOCAB_SIZE": 4096}
    ended = runs.succeed("page", **settings | {"DATA_STAGES": tmp_path / "stages.yaml"})
    # batches of 128 tokens: 4,000 is within the 32nd, 6,000 within the 47th
    mixed = f"0.5 {tmp_path}/web 0.5 {tmp_path}/books"
    assert stages_begun(ended) == [(33, 1, 16, mixed), (48, 2, 32, f"{tmp_path}/good")]
    assert "stage 1 begins at token 4,096 (sample 256), the first batch at or after token 4000" in ended.text
    # held-out documents of TRAIN_DATA are in no stage: web and books are prepared once
    prepared = [path.parent.name.rsplit("_", 1)[0] for path in (tmp_path / "data").glob("*/text.json")]
    assert sorted(prepared) == ["books", "good", "web"]
