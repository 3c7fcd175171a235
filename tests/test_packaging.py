"""`pip install .` brings what people import, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_a_wheel_holds_the_method_alone(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1", reason="building a wheel needs setuptools 70.1")
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "data", "build", "*.egg-info")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {"mimetic.py", "layouts.py", "writing.py", "verify.py", "structured.py"}
    imported = "import sys; sys.path.insert(0, sys.argv[1]); import mimetic, structured; print(mimetic.__file__)"
    found = subprocess.run(
        [sys.executable, "-I", "-c", imported, str(wheel)], check=True, capture_output=True, text=True
    )
    assert str(wheel) in found.stdout
