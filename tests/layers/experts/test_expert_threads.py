import os
import threading

import pytest
import torch

from moe_exp.layers.experts.loop import for_each_group, is_balanced


@pytest.fixture(params=[1, 2, 3])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows_L", [[], [0, 0], [5], [4, 4, 4, 4, 4, 4], [90, 1, 0, 1]])
def test_every_expert_once_and_the_threads_are_as_before(num_threads, rows_L):
    done = []
    for_each_group(done.append, rows_L)
    assert sorted(done) == list(range(len(rows_L)))
    assert torch.get_num_threads() == num_threads


def test_threads_share_balanced_experts(num_threads):
    seen, all_here = set(), threading.Barrier(num_threads)

    def task(expert: int) -> None:
        all_here.wait(60)  # passes only when every thread has a task at the same time
        seen.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()

    for_each_group(task, [4] * num_threads)
    assert len(seen) == num_threads


def test_experts_that_do_not_balance_run_with_all_threads(num_threads):
    for_each_group(
        lambda expert: None if torch.get_num_threads() == num_threads else pytest.fail("one thread"),
        [90, 1, 1],
    )


@pytest.mark.parametrize("error", [RuntimeError, IndexError])  # one that is not taken for the end of a list
def test_an_error_of_any_thread_is_raised(num_threads, error):
    def task(expert: int) -> None:
        if expert == 5:
            raise error("expert 5")

    with pytest.raises(error, match="expert 5"):
        for_each_group(task, [1] * 6)
    assert torch.get_num_threads() == num_threads


@pytest.mark.parametrize("num_threads", [3], indirect=True)
def test_an_error_of_another_thread_is_raised_once_all_are_done(num_threads):
    all_here, done = threading.Barrier(num_threads), []

    def task(expert: int) -> None:
        all_here.wait(60)
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("not the main thread")
        done.append(expert)

    with pytest.raises(RuntimeError, match="not the main thread"):
        for_each_group(task, [4] * 3)
    assert len(done) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("num_threads", [2], indirect=True)
def test_a_forked_child_has_threads_of_its_own(num_threads):
    for_each_group(lambda expert: None, [1, 1])
    if (child := os.fork()) == 0:
        done: list[int] = []
        for_each_group(done.append, [1, 1, 1])
        os._exit(0 if sorted(done) == [0, 1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("rows_L", "num_threads", "expected"),
    [
        ([4, 4], 2, True),
        ([8, 4], 2, False),
        ([3, 3, 2, 2, 2], 2, False),
        ([3, 3, 2, 2, 2, 2], 2, True),
        ([10, 1, 1, 1], 2, False),
        ([5, 5, 5], 2, False),
        ([0, 0], 2, True),
    ],
)
def test_balance_by_hand(rows_L, num_threads, expected):
    assert is_balanced(rows_L, num_threads) is expected
