"""The tests of the kernels in Triton's interpreter."""


def test_the_kernels_in_the_interpreter(interpreter):
    assert set(interpreter.skipped("test_rowwise_kernels.py")) == {"needs a GPU"}
