"""Run Python with this repository's requirements, in an environment of its own (.venv), made on the first call.

python3 run.py train_cifar.py --demo
python3 run.py -m pytest

Leaves the system's Python as it is, so it works where that refuses packages (PEP 668). Remove .venv to start afresh.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV, REQUIREMENTS = ROOT / ".venv", ROOT / "requirements.txt"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
INSTALLED = VENV / "installed.txt"  # what the environment holds: a copy of requirements.txt, written last


def works() -> bool:
    """Whether the environment's Python still runs and finds torch: the one it was made with may have been replaced."""
    look = "import importlib.util as u, sys; sys.exit(not u.find_spec('torch'))"
    try:
        return not subprocess.call([str(PYTHON), "-I", "-c", look])
    except OSError:
        return False


def main() -> int:
    if sys.version_info < (3, 10):
        sys.exit(f"run.py: needs Python 3.10 or newer, this is {sys.version.split()[0]}; try python3.11 run.py ...")
    installed = INSTALLED.read_text() if INSTALLED.exists() else ""
    if installed and not works():
        sys.exit(f"run.py: {VENV} no longer works, its Python was replaced or removed: delete that folder, try again.")
    if installed != REQUIREMENTS.read_text():
        print("run.py: setting up .venv (once; torch is a large download) ...", file=sys.stderr, flush=True)
        if subprocess.call([sys.executable, "-m", "venv", str(VENV)]):
            sys.exit("run.py: could not make .venv, see above; on Debian and Ubuntu: apt install python3-venv")
        INSTALLED.unlink(missing_ok=True)  # until pip has ended
        if subprocess.call(
            [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
        ):
            sys.exit("run.py: pip could not install requirements.txt; see its message above, then try again.")
        INSTALLED.write_text(REQUIREMENTS.read_text())
    os.environ.pop("PYTHONSAFEPATH", None)  # scripts import what lies beside them
    if os.environ.get("MPLBACKEND", "").startswith("module:"):
        del os.environ["MPLBACKEND"]  # a notebook's
    command = [str(PYTHON), *sys.argv[1:]]
    if os.name == "nt":
        return subprocess.call(command)
    os.execv(command[0], command)  # signals are then the script's, which may want time to save its run


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
