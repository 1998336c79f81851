"""The tests of the weight gradient on FP8 units, in Triton's interpreter."""


def test_the_kernels_in_the_interpreter(interpreter):
    skipped = interpreter.skipped("test_token_kernels.py")
    assert set(skipped) == {"needs compute capability 9.x"}
