"""A disk that is full for this process, without a disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_over(num_bytes: int) -> Iterator[None]:
    """Inside, a write that makes a file of this process larger than that fails (EFBIG), half way."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
