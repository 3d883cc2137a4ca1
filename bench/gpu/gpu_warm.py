"""Compiling ahead: other processes do at the same time what one process would do kernel after kernel."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor


def run_at_once(commands: dict[str, list[str]], *, seconds: float, workers: int) -> dict[str, str]:
    """Runs commands for what they leave in caches on disk.

    Args:
        commands: by name.
        seconds: for all of them; what is not done then is stopped.
        workers: how many at a time.

    Returns:
        What did not end well, by name, with the reason.
    """
    deadline = time.monotonic() + seconds

    def problem(command: list[str]) -> str:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 1e-3)
            )
        except subprocess.TimeoutExpired:
            return f"not done after {seconds:.0f} s"
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        return "" if done.returncode == 0 else f"exit code {done.returncode}: {''.join(last)[:200]}"

    with ThreadPoolExecutor(workers) as threads:
        problems = dict(zip(commands, threads.map(problem, commands.values()), strict=True))
    return {name: text for name, text in problems.items() if text}
