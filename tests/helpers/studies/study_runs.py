"""Commands that start runs of their own, in the folder of a test: as processes, or in a fork."""

import resource
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from helpers.jsonl import BinIdxWriter
from helpers.warm_runs import answer_warm
from helpers.whole_runs import ROOT, clean_environ


def write_tokens(folder: Path, num_documents: int = 200) -> Path:
    """Training data of a few thousand tokens; their prefix."""
    with BinIdxWriter(folder / "tokens", vocab_size=2048) as writer:
        for number in range(num_documents):
            writer.add_document([(number * 7 + i * i) % 2048 for i in range(60)])
    return folder / "tokens"


class StudyRuns:
    """The command `words` with these settings, started in `path`, which gets the file `printed`."""

    def __init__(self, path: Path, words: Sequence[str], settings: Mapping[str, object]):
        self.path, self._words, self._settings = path, words, settings
        self._started: list[subprocess.Popen[bytes]] = []

    def environ(self, **settings: object) -> dict[str, str]:
        return clean_environ(**{"PYTHONPATH": ROOT, **self._settings, **settings})

    def start(self, *flags: str, limit: int = 0, **settings: object) -> subprocess.Popen[bytes]:
        """Starts it; `limit`: bytes of data and anonymous memory of each process."""

        def limit_memory() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        limits = {"preexec_fn": limit_memory} if limit else {}
        with (self.path / "printed").open("w") as printed:
            place = {"env": self.environ(**settings), "cwd": self.path, "stdout": printed, "stderr": printed}
            command = [*self._words, *flags]
            self._started.append(subprocess.Popen(command, **place, start_new_session=True, **limits))
        return self._started[-1]

    def run(self, *flags: str, code: int = 0, limit: int = 0, **settings: object) -> str:
        """Runs it to its end; returns what was printed."""
        assert self.start(*flags, limit=limit, **settings).wait(900) == code, self.printed()
        return self.printed()

    def answer(self, *words: str, code: int = 0, **settings: object) -> str:
        """Prints of `moe-exp` with `words`, in a fork."""
        ended = answer_warm(list(words), self.environ(**settings), self.path)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    def printed(self) -> str:
        return (self.path / "printed").read_text()

    def wait_until(self, is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 300
        while not is_so():
            assert process.poll() is None and time.monotonic() < deadline, self.printed()
            time.sleep(0.05)

    def end(self) -> None:
        """Kills what a failed test has left; runs end by themselves when it is gone."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.wait()
