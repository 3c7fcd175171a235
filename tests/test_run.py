"""run.py makes an environment of its own once, and touches none that no longer works."""

import os
import subprocess
import sys

import pytest

import run


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*failing) runs run.main(), installs nothing and gives the commands called; the `failing` exit with 1."""
    monkeypatch.setattr(run, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(run, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(run, "INSTALLED", tmp_path / ".venv" / "installed.txt")
    monkeypatch.setattr(run, "REQUIREMENTS", tmp_path / "requirements.txt")
    monkeypatch.setattr(sys, "argv", ["run.py", "train_cifar.py", "--demo"])
    run.REQUIREMENTS.write_text("torch")

    def start(*failing):
        called = []

        def call(command):
            names = {"-c": "look", "venv": "venv", "pip": "pip", "train_cifar.py": "script"}
            (name,) = (names[word] for word in command if word in names)
            assert command[0] == (sys.executable if name == "venv" else str(run.PYTHON))
            called.append(name)
            if name == "venv" and name not in failing:
                run.PYTHON.parent.mkdir(parents=True, exist_ok=True)
                run.PYTHON.touch()
            return int(name in failing)

        def execute(program, command):  # the script takes this process's place
            raise SystemExit(call(command))

        monkeypatch.setattr(subprocess, "call", call)
        monkeypatch.setattr(os, "execv", execute)
        try:
            status = run.main()
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                raise
        assert status == int("script" in failing)
        return called

    return start


def test_the_first_call_sets_up_and_a_second_starts_at_once(start):
    assert start() == ["venv", "pip", "script"]
    assert start() == ["look", "script"] == start("script")


def test_set_up_is_tried_again_after_a_failure_and_after_requirements_have_changed(start):
    with pytest.raises(SystemExit, match="apt install python3-venv"):
        start("venv")
    with pytest.raises(SystemExit, match="pip could not install"):
        start("pip")
    assert start() == ["venv", "pip", "script"]
    run.REQUIREMENTS.write_text("torch, numpy")
    with pytest.raises(SystemExit, match="pip could not install"):
        start("pip")
    run.REQUIREMENTS.write_text("torch")  # what was there before pip was stopped halfway
    assert start() == ["venv", "pip", "script"]


def test_an_environment_whose_python_was_replaced_is_told_and_not_touched(start):
    start()
    with pytest.raises(SystemExit, match=r"\.venv no longer works.*delete that folder"):
        start("look")
    assert run.PYTHON.exists() and run.INSTALLED.exists()


def test_a_python_that_finds_torch_works_and_one_that_cannot_run_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "PYTHON", sys.executable)
    assert run.works()
    (tmp_path / "python").write_text("not a program")
    for other in (tmp_path / "python", tmp_path / "nothing", "false"):
        monkeypatch.setattr(run, "PYTHON", other)
        assert not run.works()


def test_an_old_python_is_told_which_one_is_needed(start, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit, match="needs Python 3.10 or newer"):
        start()


def test_a_script_is_not_started_with_what_a_notebook_or_a_cautious_shell_has_set(start, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    start()
    assert not {"MPLBACKEND", "PYTHONSAFEPATH"} & os.environ.keys()
