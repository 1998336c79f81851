"""Programs of several ranks are started rightly, however many GPUs there are."""

import textwrap

import gpu_ranks
import pytest
import torch


@pytest.fixture
def gpus(monkeypatch):
    """Make torch believe in as many GPUs."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return pretend


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
            import os, sys, time

            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NCCL_HOSTID", "NCCL_NVLS_ENABLE")
            print("place:", *(os.environ[name] for name in names), *sys.argv[1:], flush=True)
            if os.environ["RANK"] == "1" and "fail" in sys.argv:
                sys.exit("this rank has failed")
            time.sleep(300 if "wait" in sys.argv else 0)
        """)
    )
    return path


@pytest.mark.dist
@pytest.mark.parametrize(("count", "same_host"), [(1, False), (2, True)])
def test_each_rank_has_a_device_of_its_host(gpus, program, count, same_host):
    gpus(count)
    said = gpu_ranks.launch(program, "--some", "words", world=2)
    places = sorted(line.split()[1:] for line in said.splitlines() if line.startswith("place:"))
    (first, second) = places
    assert [first[:2], second[:2]] == [["0", "2"], ["1", "2"]]
    assert [first[2], second[2]] == ["0", "1" if same_host else "0"]
    assert (first[3] == second[3]) == same_host
    assert first[4:] == second[4:] == ["0", "--some", "words"]
    assert gpu_ranks.gpu_of(1).index == int(second[2])


@pytest.mark.dist
def test_a_rank_that_fails_ends_the_others_and_is_heard(gpus, program):
    gpus(1)
    with pytest.raises(AssertionError, match="this rank has failed"):
        gpu_ranks.launch(program, "fail", "wait", world=2, timeout=100)


@pytest.mark.dist
def test_ranks_that_hang_are_ended(gpus, program):
    gpus(1)
    with pytest.raises(AssertionError, match="not done within 8 s"):
        gpu_ranks.launch(program, "wait", world=2, timeout=8)


def test_without_a_gpu_nothing_is_set(gpus):
    gpus(0)
    assert gpu_ranks.environment_of(0) == {}
