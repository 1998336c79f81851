import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_examples_print_what_they_say(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    printed = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
        printed.append(capsys.readouterr().out)
    said = re.findall(r"^# (.*)$|^print.*  # (.*)$", blocks[0], re.MULTILINE)
    said = [(comment or trailing).removesuffix(" activations") for comment, trailing in said]
    said = [line for line in said if not line.endswith(":")]
    assert [line for line in printed[0].splitlines() if line] == said
    assert float(printed[1].split()[0]) > 0
    assert printed[2] == "", "the split example needs no word of warning"
