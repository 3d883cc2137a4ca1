"""Filters and near-duplicates of `moe-exp data prepare` against plain datatrove with the same blocks.

    python bench/data/bench_filters.py                       # CPU of both; 3 minutes
    python bench/data/bench_filters.py --planted 100000      # near-duplicates that are found; 10 minutes more

CPU is user + system of a process and its children, the median of the rounds, which go through the programs
turn by turn; one task each. Both get the same words and keep the same documents, but for a few
near-duplicates, as their hashes differ. Ours also checks and hashes every document, counts by reason, and
reads the chunk back.

With --planted N, N documents of 100 random words are written, of which every fourth has a near-duplicate with
a Jaccard similarity next to 0.9, 0.8 or 0.5, and converted by 1 and 4 tasks.
"""

import argparse
import json
import random
import shutil
import statistics
import tempfile
from pathlib import Path

from bench_convert import measure, write_source

from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.duplicates import NearDuplicates
from moe_exp.data.execution import Execution

HEAD = """
import sys
from pathlib import Path
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import JsonlWriter
source, output = sys.argv[1:]
def run(name, *pipeline, tasks=1):
    LocalPipelineExecutor(list(pipeline), tasks=tasks, workers=1, logging_dir=f"{output}/log/{name}").run()
writer = JsonlWriter(output, output_filename="x.chunk.${rank}.jsonl", compression=None)
"""
PLAIN_FILTERS = (
    HEAD
    + """
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.formatters import PIIFormatter
from moe_exp.data.convert.filters import word_tokenizer
from moe_exp.data.convert.filters import sentences_of
words = word_tokenizer(sentences=sentences_of)
filters = GopherRepetitionFilter(language=words), GopherQualityFilter(language=words), PIIFormatter()
run("all", ParquetReader(source), *filters, writer)
"""
)
PLAIN_NEAR = (
    HEAD
    + """
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter
from datatrove.pipeline.dedup import MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig
from moe_exp.data.convert.duplicates import _WORD
from moe_exp.data.convert.filters import word_tokenizer
words = word_tokenizer(_WORD.findall)
config = MinhashConfig(num_buckets=14, hashes_per_bucket=11, hash_config=HashConfig(hash_fc="sha1"))
run("sign", ParquetReader(source), MinhashDedupSignature(f"{output}/sign", config, language=words))
run("pairs", MinhashDedupBuckets(f"{output}/sign", f"{output}/pairs", config=config), tasks=14)
run("clusters", MinhashDedupCluster(f"{output}/pairs", f"{output}/gone", config))
run("filter", ParquetReader(source), MinhashDedupFilter(f"{output}/gone"), writer)
"""
)
OURS = """
import sys
from pathlib import Path
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.filters import NamedFilter
from moe_exp.data.convert.duplicates import NearDuplicates
from moe_exp.data.execution import Execution
files, output = sorted(Path(sys.argv[1]).iterdir()), Path(sys.argv[2]) / "x"
convert(files, output, ConvertSettings(tasks=1, {settings}), Execution(workers=1))
"""
NAMES = ("gopher-repetition", "gopher-quality", "pii")
CASES = {
    "gopher-repetition, gopher-quality, pii": (
        PLAIN_FILTERS,
        OURS.replace("{settings}", f"filters=tuple(map(NamedFilter.parse, {NAMES}))"),
    ),
    "near-duplicates": (PLAIN_NEAR, OURS.replace("{settings}", "near_dedup=NearDuplicates()")),
}
_MISSES = 10  # places in a row that bring a text no nearer
WORD = "abcdefghijklmnopqrstuvwxyz"


def compare(megabytes: int, rounds: int) -> None:
    """Prints CPU seconds of both, as a table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_documents, num_bytes = write_source(folder / "source", megabytes * 10**6)
        print(f"{num_documents:,} documents, {num_bytes / 1e6:.0f} MB of text, {rounds} rounds\n")
        print("| | plain datatrove, CPU s | ours, CPU s | ratio | peak MB |\n|---|---|---|---|---|")
        for case, programs in CASES.items():
            runs: list[list[tuple[float, float]]] = [[], []]
            kept = []
            for _ in range(rounds):
                for index, program in enumerate(programs):
                    output = folder / "output"
                    runs[index].append(measure(program, folder / "source", output))
                    lines = [
                        line for path in output.rglob("*.jsonl") for line in path.read_bytes().splitlines()
                    ]
                    kept.append(len(lines))
                    shutil.rmtree(output)
            assert max(kept) - min(kept) < 0.01 * num_documents, f"{case}: kept are {kept}"
            plain, ours = (statistics.median(seconds for seconds, _ in one) for one in runs)
            peak = max(megabytes for _, megabytes in runs[1])
            print(f"| {case} | {plain:.1f} | {ours:.1f} | {ours / plain:.2f} | {peak:.0f} |", flush=True)


def random_words(choice: random.Random, count: int) -> list[str]:
    """Words that no other document has."""
    return ["".join(choice.choices(WORD, k=8)) for _ in range(count)]


def similarity(first: list[str], second: list[str]) -> float:
    """Jaccard similarity of the sets of five words in a row."""
    sets = [{tuple(words[start : start + 5]) for start in range(len(words) - 4)} for words in (first, second)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def near_duplicate(choice: random.Random, words: list[str], wanted: float) -> tuple[list[str], float]:
    """The words with others in some places, and the similarity."""
    changed, found, missed = list(words), 1.0, 0
    for place in choice.sample(range(len(words)), len(words)):
        following = [*changed[:place], *random_words(choice, 1), *changed[place + 1 :]]
        reached = similarity(words, following)
        if abs(reached - wanted) < abs(found - wanted):
            changed, found, missed = following, reached, 0
        missed += 1
        if missed > _MISSES:
            break
    return changed, found


def find_planted(count: int) -> None:
    """Prints how many planted near-duplicates go, as a table."""
    choice, how = random.Random(0), NearDuplicates()
    pairs: dict[float, list[tuple[int, float]]] = {0.9: [], 0.8: [], 0.5: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [(folder / f"{number}.jsonl").open("w") for number in range(4)]
        documents = 0
        for number in range(count * 4 // 5):
            words = random_words(choice, 100)
            texts = [(f"{number}", words)]
            if number % 4 == 0:
                wanted = list(pairs)[number // 4 % 3]
                changed, found = near_duplicate(choice, words, wanted)
                texts.append((f"{number} again", changed))
                pairs[wanted].append((number, found))
            for one, text in texts:
                documents += 1
                file = choice.choice(files)
                file.write(json.dumps({"text": " ".join(text), "id": one}) + "\n")
        for file in files:
            file.close()
        kept = [kept_by(folder, num_tasks, how) for num_tasks in (1, 4)]
    gone = {name.split()[0] for name in all_names(pairs, count) - kept[0]}
    planted = {str(number) for some in pairs.values() for number, _ in some}
    print(
        f"{documents:,} documents; 1 and 4 tasks keep the same: {kept[0] == kept[1]}; "
        f"removed that are in no pair: {len(gone - planted):,}\n"
    )
    print("| similarity, mean | pairs | removed | theory |\n|---|---|---|---|")
    for some in pairs.values():
        share = sum(str(number) in gone for number, _ in some) / len(some)
        theory = statistics.mean(how.probability(found) for _, found in some)
        mean = statistics.mean(found for _, found in some)
        print(f"| {mean:.3f} | {len(some):,} | {share:.2%} | {theory:.2%} |")


def all_names(pairs: dict[float, list[tuple[int, float]]], count: int) -> set[str]:
    """Ids of all documents."""
    names = {str(number) for number in range(count * 4 // 5)}
    return names | {f"{number} again" for some in pairs.values() for number, _ in some}


def kept_by(folder: Path, num_tasks: int, how: NearDuplicates) -> set[str]:
    """Ids of the documents that stay."""
    output = folder / "out"
    settings = ConvertSettings(tasks=num_tasks, near_dedup=how)
    convert(sorted(folder.glob("*.jsonl")), output, settings, Execution(workers=2))
    lines = [line for path in output.glob("*.jsonl") for line in path.read_text().splitlines()]
    shutil.rmtree(output)
    return {json.loads(line)["id"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--planted", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    if arguments.planted:
        find_planted(arguments.planted)
    else:
        compare(arguments.mb, arguments.rounds)


if __name__ == "__main__":
    main()
