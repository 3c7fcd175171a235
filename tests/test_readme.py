"""README.md stays true: its examples run, its commands parse, its line numbers point at the code they quote."""

import re
import shlex
from pathlib import Path

import pytest

import train_cifar
import train_imagenet
import train_lm
from mistakes import MISTAKES, first_failure, mutated

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"))
def test_python_examples_run(code):
    for library in ("timm", "transformers", "torchvision", "vit_pytorch", "model"):
        if f"import {library}\n" in code or f"from {library}" in code:
            pytest.importorskip(library)
    exec(compile(code, "README.md", "exec"), {})


def commands():
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0] in ("python", "python3"):
                yield [word for word in words[1:] if word != "run.py"]
            if words and words[0] == "torchrun":
                yield words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]


def test_there_are_examples_to_test():
    assert blocks("python") and len(list(commands())) >= 4


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_commands_name_files_and_flags_that_exist(words):
    script, *flags = words
    if script == "-m":
        assert flags[0] in ("pytest", "venv", "pip")
    else:
        assert (ROOT / script).is_file()
    modules = {"train_cifar.py": train_cifar, "train_imagenet.py": train_imagenet, "train_lm.py": train_lm}
    if module := modules.get(script):
        flags.parse_settings(module.Settings, [flag for flag in flags if flag != "--help"], "", {})
    elif script != "-m":
        source = (ROOT / script).read_text("utf-8")
        for word in flags[:1] + [flag for flag in flags if re.fullmatch(r"--[\w-]+", flag)]:
            assert f'"{word}"' in source or word in source.split('"""')[1].split() or (ROOT / word).is_file(), word


def test_equation_table_points_at_the_lines_it_quotes():
    rows = re.findall(r"\[(\w+\.py):(\d+)\]\(\1#L\2\) \| `([^`]+)`", README)
    assert len(rows) >= 7
    for file, number, code in rows:
        assert code in (ROOT / file).read_text("utf-8").splitlines()[int(number) - 1], f"{file}:{number} is not {code}"


def test_table_of_mistakes_names_tests_that_exist():
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for words, file, right, wrong in MISTAKES:
        mutated((ROOT / file).read_text("utf-8"), right, wrong)  # the mistake can still be made
        row = next(line for line in README.splitlines() if line.startswith(f"| {words} |"))
        assert f"def {row.split('`')[1]}(" in tests


def test_the_first_mistake_of_the_table_is_caught_as_it_says():
    words, *mistake = MISTAKES[0]
    test, _ = first_failure(*mistake)  # how many fail depends on what the machine has
    assert f"| {words} | {mistake[0]} | `{test}` | " in README
