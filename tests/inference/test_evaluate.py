"""`moe-exp eval`: against transformers, by every layout, with the validation loss of a training; refusals."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from helpers.checkpoint.small_job import run_to_end, small_settings
from helpers.hf.hf_checkpoint import EXPERTS, LAYERS, SEQ_LEN, VOCAB, tiny_model, write_checkpoint
from helpers.hf.tiny_models import tiny_folder
from helpers.jsonl import BinIdxWriter
from helpers.ranks import free_port, run_on_ranks
from moe_exp import cli
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.cli import main
from moe_exp.config import Config
from moe_exp.config.loading import to_yaml
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.data.tokens.tokens import TokenFiles
from moe_exp.engine import runtime
from moe_exp.inference.evaluate import Cut, EvalRequest, HeldOut, evaluate, plan_evaluation
from moe_exp.inference.ranks import Layout, run_alone
from moe_exp.launch.machine_checks import check_files
from moe_exp.runs.records import read_metrics

EOD = 256
COUNTED = ("data", "sequences", "tokens", "bytes")
TEXTS = {
    "prose": ["Grüße an alle", "the end", "x" * 130, "a"],
    "code": ["def f():\n    return 1\n" * 4, "", "né 🙂" * 9],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return write_checkpoint(tiny_model("mixtral"), tmp_path_factory.mktemp("mixtral") / "iter_0000000")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("held_out")
    for name, texts in TEXTS.items():
        with BinIdxWriter(folder / name, vocab_size=VOCAB, eod_id=EOD) as writer:
            for text in texts:
                writer.add_document(list(text.encode()))
    return {name: str(folder / name) for name in TEXTS}


def run_eval(checkpoint: Path, *flags: str) -> int:
    return cli.main(["eval", "--checkpoint", str(checkpoint), "--threads-per-rank", "1", *flags])


def evaluated(checkpoint: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert run_eval(checkpoint, "--json", *flags) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


@torch.no_grad()
def nats(tokens: list[int], samples: int | None = None, *, seq_len: int = SEQ_LEN) -> tuple[float, int, int]:
    """Cross entropy by transformers, one sequence after the other; tokens and sequences."""
    model = tiny_model("mixtral")
    losses = []
    for begin in list(range(0, len(tokens) - 1, seq_len))[:samples]:
        ids = torch.tensor([tokens[begin : begin + seq_len + 1]])
        logits = model(ids[:, :-1]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").double())
    return sum(one.sum().item() for one in losses), sum(map(len, losses)), len(losses)


def documents(name: str) -> list[list[int]]:
    return [[*text.encode(), EOD] for text in TEXTS[name]]


def joined(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]


def test_rows_and_total_are_those_of_transformers(checkpoint, prefixes, capsys):
    """All documents as one text: every token but the first counts, in windows, the last a shorter one."""
    result = evaluated(checkpoint, capsys, "--data", *prefixes.values(), "--batch-size", "3")
    sums = [0.0, 0, 0]
    for row, name in zip(result["data"], TEXTS, strict=True):
        expected, num_tokens, num_sequences = nats(joined(documents(name)))
        assert num_tokens % SEQ_LEN
        # All bytes of the texts but the first, which no token predicts.
        num_bytes = sum(len(text.encode()) for text in TEXTS[name]) - 1
        assert [row[key] for key in COUNTED] == [prefixes[name], num_sequences, num_tokens, num_bytes]
        assert row["lm_loss"] == pytest.approx(expected / num_tokens, rel=1e-6)
        assert row["lm_loss_ppl"] == pytest.approx(math.exp(row["lm_loss"]), rel=1e-12)
        assert row["bits_per_byte"] == pytest.approx(expected / math.log(2) / num_bytes, rel=1e-6)
        sums = [sums[0] + expected, sums[1] + num_tokens, sums[2] + num_bytes]
    total = result["total"]
    assert (total["data"], total["tokens"], total["bytes"]) == ("total", sums[1], sums[2])
    assert total["lm_loss"] == pytest.approx(sums[0] / sums[1], rel=1e-6)
    assert total["bits_per_byte"] == pytest.approx(sums[0] / math.log(2) / sums[2], rel=1e-6)


def test_samples_and_documents(checkpoint, prefixes, capsys):
    """The first sequences alone; and every document alone, whose first token nothing predicts."""
    (row,) = evaluated(checkpoint, capsys, "--data", prefixes["prose"] + ".bin", "--samples", "2")["data"]
    expected, num_tokens, _ = nats(joined(documents("prose")), samples=2)
    assert (row["sequences"], row["tokens"], num_tokens) == (2, 2 * SEQ_LEN, 2 * SEQ_LEN)
    assert row["lm_loss"] == pytest.approx(expected / num_tokens, rel=1e-6)
    (row,) = evaluated(checkpoint, capsys, "--data", prefixes["code"], "--by-document")["data"]
    parts = [nats(document) for document in documents("code")]
    assert [row["tokens"], row["sequences"]] == [sum(part[i] for part in parts) for i in (1, 2)]
    assert row["lm_loss"] == pytest.approx(sum(part[0] for part in parts) / row["tokens"], rel=1e-6)
    assert row["bytes"] == sum(max(0, len(text.encode()) - 1) for text in TEXTS["code"])


def test_without_data_it_takes_what_the_run_held_out(prefixes, tmp_path, caplog):
    data = {"train_data": prefixes["prose"], "split": "50,50", "data_order": "megatron"}
    folder = write_checkpoint(tiny_model("mixtral"), tmp_path / "iter_0000000", **data)
    bounds = TokenFiles(prefixes["prose"]).document_bounds.tolist()
    with caplog.at_level("INFO", "moe_exp"):
        (source,) = plan_evaluation(EvalRequest(str(folder), tokenizer="bytes")).sources
    assert "data: the validation part of TRAIN_DATA (SPLIT=50,50)" in caplog.text
    assert (source.begins[0], source.ends[-1]) == (bounds[2], bounds[4])


@pytest.fixture
def run(prefixes, tmp_path) -> Path:
    """The folder of another run, with shorter samples and a split of its own."""
    data = {"train_data": prefixes["prose"], "split": "50,50", "seq_len": 20, "tokenizer": "bytes"}
    model, checkpoints = tiny_model("mixtral"), tmp_path / "runs/a1/checkpoints"
    for value in model.parameters():
        value.data.mul_(0.5)
    folder = write_checkpoint(model, checkpoints / "iter_0000003", run_name="a1", **data)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("3")
    (checkpoints.parent / "config.yaml").write_text(to_yaml(Config(**read_common(folder)["config"])))
    return checkpoints.parent


@pytest.mark.parametrize("named", ["run", "checkpoints", "iteration", "no checkpoint"])
def test_data_of_another_run(named, checkpoint, run, capsys):
    """Its held-out part, in sequences of its length, by the model of the checkpoint."""
    own = evaluated(run, capsys)
    path = {"checkpoints": run / "checkpoints", "iteration": run / "checkpoints/iter_0000003"}.get(named, run)
    if named == "no checkpoint":
        shutil.rmtree(run / "checkpoints")
    found = evaluated(checkpoint, capsys, "--data-of", str(path))
    expected, num_tokens, num_sequences = nats(joined(documents("prose")[2:]), seq_len=20)
    (row,) = found["data"]
    assert (row["sequences"], row["tokens"]) == (num_sequences, num_tokens)
    assert row["lm_loss"] == pytest.approx(expected / num_tokens, rel=1e-6)
    assert [row[name] for name in COUNTED] == [own["data"][0][name] for name in COUNTED]
    assert abs(own["total"]["lm_loss"] - row["lm_loss"]) > 0.01


@pytest.mark.parametrize("changes", [{"eod_mask_loss": True}, {"document_mask": True}])
def test_data_of_counts_and_masks_as_that_run(changes, checkpoint, run, prefixes, capsys):
    changes = changes | {"train_data": prefixes["prose"], "split": "50,50", "seq_len": 20}
    same = write_checkpoint(tiny_model("mixtral"), run / "checkpoints/iter_0000003", **changes)
    expected = evaluated(same, capsys)["total"]
    found = evaluated(checkpoint, capsys, "--data-of", str(run))["total"]
    assert found == expected != evaluated(checkpoint, capsys, "--data", prefixes["prose"])["total"]


@pytest.fixture
def other(prefixes, tmp_path) -> Path:
    """A checkpoint of a model with another tokenizer, which same.json has, too."""
    texts = [text for texts in TEXTS.values() for text in texts]
    train_bpe(texts * 3, 257, special_tokens=["<x>"]).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token | {"special": False} for token in content["added_tokens"]]
    (tmp_path / "same.json").write_text(json.dumps(content, indent=8))
    data = {"train_data": prefixes["prose"], "split": "50,50", "tokenizer": str(tmp_path / "tokenizer.json")}
    return write_checkpoint(tiny_model("mixtral"), tmp_path / "other/iter_0000000", **data)


def refused(checkpoint: Path, capsys, *flags: str, lines: int = 1) -> str:
    assert run_eval(checkpoint, *flags) == 1, flags
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == printed.err.count(" Fix: ") == lines, printed.err
    return printed.err


def test_data_of_a_run_of_another_tokenizer(checkpoint, other, tmp_path, capsys):
    assert f"DATA_OF={other}: the run's tokenizer " in refused(checkpoint, capsys, "--data-of", str(other))
    flags = ["--data-of", str(other), "--tokenizer", str(tmp_path / "same.json")]
    assert evaluated(checkpoint, capsys, *flags)["total"]["tokens"]


def test_data_of_another_tokenizer_by_its_manifest(checkpoint, prefixes, tmp_path, capsys):
    (tmp_path / "made.manifest.json").write_text(json.dumps({"settings": {"tokenizer": {"hash": "0"}}}))
    for suffix in (".bin", ".idx"):
        shutil.copyfile(prefixes["prose"] + suffix, tmp_path / f"made{suffix}")
    data = {"train_data": "x", "valid_data": str(tmp_path / "made"), "tokenizer": ""}
    made = write_checkpoint(tiny_model("mixtral"), tmp_path / "made/iter_0000000", **data)
    rule = f"the manifest of {tmp_path}/made names a tokenizer other than"
    assert f"DATA_OF={made}: {rule}" in refused(checkpoint, capsys, "--data-of", str(made))
    flags = ["--data", str(tmp_path / "made")]
    assert f"DATA={tmp_path}/made: {rule}" in refused(checkpoint, capsys, *flags)
    assert evaluated(checkpoint, capsys, *flags, "--allow-other-data")["total"]["tokens"]


def test_a_converted_model_was_not_trained_on_the_embedded_corpus(tmp_path, capsys, monkeypatch):
    """Neither its data nor its tokenizer takes the place of what nobody knows, in any command."""
    monkeypatch.chdir(tmp_path)
    embedded = embedded_folder(Path("data"))
    embedded.mkdir(parents=True)
    train_bpe(["def f(): return 1"] * 9, 300).save(str(embedded / "tokenizer.json"))
    from_hf(tiny_folder(tmp_path / "hf", "mixtral", changes={"vocab_size": 2048}), tmp_path / "ours")
    assert main(["ckpt", "average", "ours", "averaged"]) == 0
    for name in ("ours", "averaged"):
        capsys.readouterr()
        assert "DATA=: the training data of a converted model" in refused(tmp_path / name, capsys)
        assert main(["generate", "--checkpoint", name, "--prompt", "a"]) == 1
        assert "TOKENIZER=: is unknown, because it was not set in training." in capsys.readouterr().err
        for setting in ("load_dir", "upcycle_from"):
            rule = (
                f"TRAIN_DATA=: {setting.upper()}={name} has a different vocabulary than the embedded corpus"
            )
            assert rule in "".join(check_files(Config(**{setting: name}, num_experts=4, vocab_size=2048)))
        assert main(["convert", "to-hf", name, f"{name}_hf"]) == 0
        assert not (tmp_path / f"{name}_hf/tokenizer.json").exists()
    assert [path.name for path in embedded.parent.iterdir()] == [embedded.name]  # no corpus was made


def test_first_tokens_of_documents_count_as_such(tmp_path):
    """Some tokenizers give the first token of a text fewer bytes, here 10 instead of 1."""
    documents = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3, 4]]
    with BinIdxWriter(tmp_path / "text", vocab_size=10, eod_id=0) as writer:
        for document in documents:
            writer.add_document(document)
    stream = [token for document in documents for token in ([10, *[1] * len(document)])]  # and the end
    token_bytes = SimpleNamespace(bos_id=None, each=lambda ids, is_first: np.where(is_first, 10, 1))
    for seq_len in (1, 2, 4, 5, 30):
        held_out = HeldOut(str(tmp_path / "text"), Cut(seq_len))
        sequences = held_out.read(0, len(held_out))
        assert held_out.count_bytes(0, sequences, token_bytes, None) == sum(stream[1:])
        assert held_out.count_bytes(0, sequences[:1], token_bytes, None) == sum(stream[1 : seq_len + 1])


def test_a_share_of_the_documents(prefixes):
    source = HeldOut(prefixes["prose"], Cut(SEQ_LEN, by_document=True, share=(0.5, 1.0)))
    assert (source.ends - source.begins - 1).sum() == len(joined(documents("prose")[2:])) - 2
    with pytest.raises(ValueError, match="must have at least two tokens"):
        HeldOut(prefixes["prose"], Cut(SEQ_LEN, share=(0.0, 0.1)))


def on_ranks(requests: list[EvalRequest], ports: list[int]) -> list[dict]:
    results = []
    for request, port in zip(requests, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # the store of the job before may still be there
        plan = plan_evaluation(request)
        results.append(evaluate(plan, runtime.start(plan.config)).to_json())
        runtime.stop()
    return results


@pytest.mark.slow  # in test_generate.py several ranks are one model
def test_the_same_numbers_on_two_ranks(checkpoint, prefixes):
    """Losses, bytes and the counts of the experts, with padded rows and batches uneven over two replicas."""
    one = EvalRequest(str(checkpoint), tuple(prefixes.values()), experts=4, batch_size=2, by_document=True)
    expected: list[dict] = []
    plan = plan_evaluation(replace(one, layout=Layout(threads_per_rank=1)))
    assert len(plan.batches) % 2
    run_alone(plan.config, lambda rank: expected.append(evaluate(plan, rank).to_json()))
    layouts = [Layout(ep=2), Layout(tp=2, etp=2), Layout(tp=2), Layout(pp=2), Layout(gpus_per_node=2)]
    requests = [replace(one, layout=replace(layout, threads_per_rank=1)) for layout in layouts]
    first, second = run_on_ranks(2, on_ranks, requests, [free_port() for _ in requests], join=False)
    assert first == second
    for layout, result in zip(layouts, first, strict=True):
        rows = ([*one["data"], one["total"]] for one in (result, *expected))
        for mine, theirs in zip(*rows, strict=True):
            assert [mine[name] for name in COUNTED] == [theirs[name] for name in COUNTED], layout
            for name in ("lm_loss", "bits_per_byte"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6), layout


@torch.no_grad()
def test_experts_are_those_that_transformers_chooses(checkpoint, prefixes, capsys):
    model = tiny_model("mixtral")
    result = evaluated(checkpoint, capsys, "--data", *prefixes.values(), "--experts")
    assert [layer["layer"] for layer in result["experts"]] == list(range(1, LAYERS + 1))
    for name, prefix in prefixes.items():
        tokens = joined(documents(name))
        expected = np.zeros((LAYERS, EXPERTS), dtype=int)
        for begin in range(0, len(tokens) - 1, SEQ_LEN):
            ids = torch.tensor([tokens[begin : begin + SEQ_LEN + 1]])[:, :-1]
            for layer, logits in enumerate(model(ids, output_router_logits=True).router_logits):
                expected[layer] += np.bincount(logits.topk(2, dim=-1).indices.flatten(), minlength=EXPERTS)
        for layer, counts in zip(result["experts"], expected, strict=True):
            assert layer["tokens_per_expert"][prefix] == counts.tolist()
            assert layer["shares"][prefix] == pytest.approx(counts / counts.sum())
            assert sorted(layer["order"]) == list(range(EXPERTS))


def test_the_tables(checkpoint, prefixes, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert run_eval(checkpoint, "--data", *prefixes.values(), "--experts", "3") == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("prose", "code", "total", "bits per byte", "layer 2: ", "25.00%"))


def test_without_a_tokenizer_there_are_no_bits_per_byte(prefixes, tmp_path, capsys, caplog):
    folder = write_checkpoint(tiny_model("mixtral"), tmp_path / "iter_0000000", tokenizer="")
    flags = ["--data", prefixes["prose"], "--samples", "1"]
    with caplog.at_level("WARNING", "moe_exp"):
        (row,) = evaluated(folder, capsys, *flags)["data"]
    assert (row["bytes"], row["bits_per_byte"]) == (None, None) and row["lm_loss"] > 0
    assert "no bits per byte: TOKENIZER=: is unknown, because it was not set in training." in caplog.text
    assert evaluated(folder, capsys, *flags, "--tokenizer", "bytes")["total"]["bits_per_byte"] > 0


def test_bad_input(checkpoint, run, prefixes, tmp_path, capsys):
    prose = prefixes["prose"]
    for name, vocab_size, document in (("other", 5000, [1, 2, VOCAB, 3]), ("tiny", VOCAB, [])):
        with BinIdxWriter(tmp_path / name, vocab_size=vocab_size) as writer:
            writer.add_document(document)
    none, other = str(tmp_path / "none"), str(tmp_path / "other")
    numbers = ["--samples", "0", "--batch-size", "-1", "--experts", "0"]
    cases = [
        (["--data", prose, none, other], ["none.bin is missing. Fix: ", f"has id {VOCAB} at token 2, "]),
        (["--data", str(tmp_path / "tiny")], ["tiny: must have at least two tokens. Fix: "]),
        (["--data", prose, prose + ".idx"], ["must not name a prefix twice. Fix: "]),
        (["--data", prose, *numbers], ["SAMPLES=0: must be", "BATCH_SIZE=-1: must be", "EXPERTS=0: must be"]),
        (["--data", prose, "--capacity", "--by-document"], ["BY_DOCUMENT=true: "]),
        (["--data", prose, "--ep", "8"], ["EP=8: must divide NUM_EXPERTS=4. Fix: "]),
        ([], ["DATA=: training used neither VALID_DATA nor a SPLIT"]),
        (["--data-of", str(run), "--data", prose], [f"DATA_OF={run}: cannot be combined with --data."]),
        (["--data-of", none], [f"DATA_OF={none}: does not exist. Fix: "]),
        (["--data-of", str(tmp_path)], [f"DATA_OF={tmp_path}: is not a distributed checkpoint"]),
        (["--data-of", str(checkpoint)], [f"DATA_OF={checkpoint}: "]),
    ]
    for flags, lines in cases:
        said = refused(checkpoint, capsys, *flags, lines=len(lines))
        assert all(line in said for line in lines), said


def test_a_dense_model_has_no_experts(prefixes, tmp_path, capsys):
    folder = write_checkpoint(tiny_model("llama"), tmp_path / "iter_0000000")
    assert "EXPERTS=8: requires an MoE model" in refused(
        folder, capsys, "--data", prefixes["code"], "--experts"
    )


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_the_validation_of_the_training(eod_mask_loss, tmp_path, capsys):
    """The loss and the bits per byte of the valid record: EVAL_ITERS global batches of whole sequences."""
    tokenizer = train_bpe([text for texts in TEXTS.values() for text in texts] * 3, 280)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "Grüße an alle 世界, return x of the end\n" * 2
    eod = tokenizer.token_to_id("<|endoftext|>")
    with BinIdxWriter(tmp_path / "tokens", vocab_size=384, eod_id=eod) as writer:
        for _ in range(60):
            writer.add_document(tokenizer.encode(text).ids)
    settings = small_settings(
        tmp_path, "run", num_layers=1, seq_len=32, vocab_size=384, train_iters=2, warmup_iters=1,
        decay_iters=2, eval_interval=2, eval_iters=3, lr=0.01, init_std=0.1, tokenizer=tmp_path,
        valid_data=tmp_path / "tokens", eod_mask_loss=eod_mask_loss,
    )  # fmt: skip
    assert run_to_end(settings)[0] == 0
    (record,) = (one for one in read_metrics(tmp_path / "run" / "metrics.jsonl") if one["kind"] == "valid")
    result = evaluated(tmp_path / "run", capsys, "--samples", "12")  # and its VALID_DATA by itself
    (row,) = result["data"]
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16)[: 12 * 32 + 1]
    counts = tokens[:-1] != eod
    assert row["tokens"] == (counts.sum() if eod_mask_loss else 12 * 32) and counts.sum() < 12 * 32
    # with a mask, the record's is the mean of those of micro-batches
    error = 1e-3 if eod_mask_loss else 1e-6
    assert row["lm_loss"] == pytest.approx(record["lm_loss"], rel=error)
    assert row["bits_per_byte"] == pytest.approx(record["lm_loss_bits_per_byte"], rel=error)
    # The same bytes by decoding what was predicted; the byte of an end of document is none.
    predicted = tokens[1:][counts] if eod_mask_loss else tokens[1:]
    # the last character may be cut
    assert row["bytes"] == pytest.approx(len(tokenizer.decode(predicted.tolist()).encode()), abs=2)
