"""Fetch a file once, whole and checked, for images.py and text.py.

A wrong file raises ValueError, one that cannot be fetched FileNotFoundError; both end with the caller's advice.
"""

import hashlib
import http.client
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

from training.flags import did_you_mean


def fetch(url: str, path: Path, md5: str, advice: str) -> None:
    """Download `url` to `path`. The file gets its name only once it is complete, so half of it never passes for all."""
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as temporary:
                partial = Path(temporary) / path.name
                with partial.open("wb") as file:
                    copy_with_progress(response, file, path.name)
                check_md5(partial, md5, f"try again, or {advice}")
                os.replace(partial, path)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise FileNotFoundError(f"could not download {path.name} ({reason}): {advice}") from error


def obtain(url: str, path: Path, md5: str, advice: str, download: bool = True) -> None:
    """Make sure that the official file is at `path`: check it if it is there, otherwise download it if `download`."""
    if path.is_file():
        check_md5(path, md5, f"delete {path} and try again")
    elif download:
        fetch(url, path, md5, advice)
    else:
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}: {advice}")


def find(known: dict, name: str, kind: str):
    """known[name]. Raises ValueError, with the nearest name, if there is none."""
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}, only {', '.join(known)}{did_you_mean(name, known)}")
    return known[name]


def kept(folder: Path, name: str) -> Path:
    """Where `name`, derived from the data in `folder`, is kept: there, or if that is read-only and lacks it, in a new
    folder below $XDG_CACHE_HOME/mimetic (~/.cache/mimetic).
    """
    if (folder / name).exists() or not folder.exists() or os.access(folder, os.W_OK):
        return folder / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mimetic"
    cache = cache / "-".join(folder.resolve().parts[1:])
    cache.mkdir(parents=True, exist_ok=True)
    return cache / name


def check_md5(path: Path, expected: str, advice: str) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if (found := digest.hexdigest()) != expected:
        raise ValueError(f"{path.name} is not the official file (MD5 {found}, not {expected}): {advice}")


def progress(what: str, done: float, total: float, unit: str) -> None:
    """Report the progress of `what` on stderr: one rewritten line on a terminal, only beginning and end in a file.

    total: 0 if it is unknown; the last call then repeats `done`.
    """
    terminal, ended = sys.stderr.isatty(), done == total > 0
    if terminal or ended or not done:
        text = f"{what}: {done:.0f}{f' of {total:.0f}' if total else ''} {unit}"
        before, after = "\r" if terminal else "", "" if terminal and not ended else "\n"
        print(before + text, end=after, file=sys.stderr, flush=True)


def copy_with_progress(response, file, name: str) -> None:
    what, total, done = f"downloading {name}", int(response.headers.get("Content-Length") or 0), 0
    progress(what, 0, total / 1e6, "MB")
    while chunk := response.read(1 << 20):
        file.write(chunk)
        done += len(chunk)
        progress(what, done / 1e6, total / 1e6, "MB")
    if done != total:
        progress(what, done / 1e6, done / 1e6, "MB")
    if done < total:  # read() raises nothing if the connection ends early
        raise OSError(f"the connection ended after {done:,} of {total:,} bytes; try again")
