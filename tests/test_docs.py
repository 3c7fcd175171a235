"""README.md and docs/ stay true: examples run, commands parse, links lead somewhere, quoted lines are those quoted."""

import re
import shlex
from pathlib import Path

import pytest

import train_cifar
import train_imagenet
import train_lm
from mistakes import MISTAKES, first_failure, mutated

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in [README, *(ROOT / "docs").glob("*.md")]}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SCRIPTS = {"train_cifar.py": train_cifar, "train_imagenet.py": train_imagenet, "train_lm.py": train_lm}


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", text)


# ---- code


EXAMPLES = [
    (page, code) for page, text in sorted(PAGES.items()) for kind, code in FENCE.findall(text) if kind == "python"
]


@pytest.mark.parametrize("page, code", EXAMPLES, ids=[f"{page}-{i}" for i, (page, _) in enumerate(EXAMPLES)])
def test_python_examples_run(page, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    if run := re.search(r'load_run\("(.+)/mimetic-seed0"', code):
        tiny = "--dataset shapes --limit 100 --width 24 --depth 1 --patch-size 8 --epochs 1 --batch-size 50"
        train_cifar.main(f"{tiny} --init mimetic --precision fp32 --device cpu --out {run[1]}".split())
    for library in ("timm", "transformers", "torchvision", "vit_pytorch", "model"):
        if re.search(rf"^(import|from) {library}\b", code, re.MULTILINE):
            pytest.importorskip(library)
    exec(compile(code, page, "exec"), {"__name__": "example"})


def commands(text: str):
    """The words behind python or torchrun's own flags, script first, of each command in blocks and in `python ...`."""
    lines = [
        line
        for kind, code in FENCE.findall(text)
        if kind != "python"
        for line in code.replace("\\\n", " ").splitlines()
    ]
    lines += re.findall(r"`((?:python3?|torchrun) [^`]+)`", prose(text))
    for line in lines:
        line = re.sub(r"^(\w+=\S* )+", "", line.strip())  # variables
        if line.startswith(("python ", "python3 ", "torchrun ")):
            words = [word for word in shlex.split(line, comments=True)[1:] if word not in ("run.py", "…", "...")]
            starts = [i for i, word in enumerate(words) if word.endswith(".py")] if line.startswith("torchrun") else [0]
            if words and starts:
                yield words[starts[0] :]


COMMANDS = [(page, words) for page, text in sorted(PAGES.items()) for words in commands(text)]


def test_there_are_examples_to_test():
    assert EXAMPLES and sum(page == "README.md" for page, _ in COMMANDS) >= 4


@pytest.mark.parametrize("page, words", COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_commands_name_files_and_flags_that_exist(page, words):
    script, *flags = words
    if script == "-m":
        assert flags[0] in ("pytest", "venv", "pip")
        return
    assert (ROOT / script).is_file() or script.isupper()  # SCRIPT stands for any of them
    if script in SCRIPTS:
        SCRIPTS[script].settings([flag for flag in flags if flag != "--help"])
    elif not script.isupper():
        named = [word for word in flags[:1] if not word.isupper() and "/" not in word]
        for word in named + [flag for flag in flags if re.fullmatch(r"--[\w-]+", flag)]:
            setting = word.removeprefix("--").replace("-", "_") in vars(train_cifar.Settings())  # figures.py takes them
            assert setting or f'"{word}"' in sources(script) or (ROOT / word).is_file(), word


def sources(script: str) -> str:
    """The source of a script, and of the modules and packages here that it names."""
    source = (ROOT / script).read_text("utf-8")
    names = set(re.findall(r"\w+", source))
    files = [file for file in ROOT.glob("*.py") if file.stem in names]
    files += [file for file in ROOT.glob("*/*.py") if file.parent.name in names - {"tests"}]
    return source + "".join(file.read_text("utf-8") for file in files)


# ---- links


def links(text: str) -> list[str]:
    """The targets of links and images that lead to files here."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that headings have in links."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_and_images_lead_to_files_and_headings(page):
    for target in links(PAGES[page]):
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text("utf-8")), target


def test_every_page_is_reached_from_the_first():
    reached, found = set(), {README}
    while found:
        file = found.pop()
        reached.add(file)
        text = PAGES.get(str(file.relative_to(ROOT)), "")
        found |= {
            (file.parent / target.partition("#")[0]).resolve() for target in links(text) if ".md" in target
        } - reached
    assert {str(file.relative_to(ROOT)) for file in reached} >= set(PAGES)


# ---- what they say


def test_lines_that_are_quoted_stand_where_the_link_leads():
    link, quoted = re.compile(r"\[([\w/]+\.py):(\d+)\]\(([\w./]+)#L(\d+)\)(?: \| `([^`]+)`)?"), 0
    for page, text in PAGES.items():
        for name, number, target, line, code in link.findall(text):
            file = ((ROOT / page).parent / target).resolve()
            assert (file, number) == (ROOT / name, line), f"{page}: {name}:{number} leads to {target}#L{line}"
            assert code in file.read_text("utf-8").splitlines()[int(line) - 1], f"{page}: {name}:{number} is not {code}"
            quoted += bool(code)
    assert quoted >= 7


def test_the_first_page_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 200


@pytest.mark.parametrize("page", sorted(PAGES))
def test_no_page_shows_what_was_not_run(page):
    assert "not run yet" not in PAGES[page]


def test_table_of_mistakes_names_tests_that_exist():
    tests = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    for words, file, right, wrong in MISTAKES:
        mutated((ROOT / file).read_text("utf-8"), right, wrong)  # the mistake can still be made
        row = next(line for line in PAGES["docs/mistakes.md"].splitlines() if line.startswith(f"| {words} |"))
        assert f"def {row.split('`')[1]}(" in tests


def test_the_first_mistake_of_the_table_is_caught_as_it_says():
    words, *mistake = MISTAKES[0]
    test, _ = first_failure(*mistake)  # how many fail depends on what the machine has
    assert f"| {words} | {mistake[0]} | `{test}` | " in PAGES["docs/mistakes.md"]
