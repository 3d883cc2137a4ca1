"""A token that the model does not have is named before it is embedded."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.token_files import SEQ_LEN, write_corpus
from moe_exp.data.samples.dataset import SampleStream
from moe_exp.training.samples import read_tokens

VOCAB_SIZE = 61


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Documents of one window each, tokens 1 to 60 and the end of document."""
    return write_corpus(tmp_path, 50)


@pytest.mark.parametrize("token", [VOCAB_SIZE, 65535])
def test_a_corrupt_file_is_named_with_sample_and_document(prefix, token):
    stream = SampleStream([(1.0, str(prefix))], seq_len=SEQ_LEN, seed=1)
    (document,) = stream.origin(7).documents[:1]
    tokens = np.fromfile(prefix.with_suffix(".bin"), dtype=np.uint16)
    tokens[document * SEQ_LEN + 5] = token
    tokens.tofile(prefix.with_suffix(".bin"))
    stream = SampleStream([(1.0, str(prefix))], seq_len=SEQ_LEN, seed=1)
    documents = ", ".join(map(str, stream.origin(7).documents))
    text = f"{prefix}: sample 7 (documents {documents}) has the token {token}, but VOCAB_SIZE is {VOCAB_SIZE}"
    with pytest.raises(ValueError, match=re.escape(text)):
        read_tokens(stream, 4, 6, vocab_size=VOCAB_SIZE)
    # the samples before it are sound
    assert torch.equal(read_tokens(stream, 0, 7, vocab_size=VOCAB_SIZE), stream.batch(0, 7))
