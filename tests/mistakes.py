"""Make each mistake that public copies of the method contain, in a copy of this repository, and name the test it fails.

    python tests/mistakes.py        prints the table of docs/mistakes.md

Each entry: the mistake in words, the file, the text that is right, the text that is wrong.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MISTAKES = [
    ("V and proj stored untransposed", "layouts.py", "W_Q, W_K, v.T, proj.T, *biases", "W_Q, W_K, v, proj, *biases"),
    ("W_proj = V Σ^½, as the paper lists it, applied as is", "mimetic.py",
     "return svd_split(alpha * gaussian(dim, generator) - beta * identity(dim), rank=dim)",
     "A, B = svd_split(alpha * gaussian(dim, generator) - beta * identity(dim), rank=dim)\n    return A, B.T"),
    ("Q and K stored untransposed", "layouts.py",
     ".transpose(1, 2)  # (H*K, D)", ".reshape(heads, q.shape[1], -1)  # (H*K, D)"),
    ("noise of deviation 1/d for 1/√d", "mimetic.py", "/ math.sqrt(dim)\n\n\ndef identity", "/ dim\n\n\ndef identity"),
    ("uniform noise for Gaussian", "mimetic.py",
     "torch.randn(dim, dim, generator=generator, device=\"cpu\", dtype=torch.float32)",
     "(torch.rand(dim, dim, generator=generator) - 0.5) * math.sqrt(12)"),
    ("square root of Σ taken twice", "mimetic.py", "S[:rank], V_T[:rank]", "S[:rank].sqrt(), V_T[:rank]"),
    ("α₁, β₁ and α₂, β₂ swapped", "mimetic.py",
     "    for layer in layers:\n        dim",
     "    alpha1, beta1, alpha2, beta2 = alpha2, beta2, alpha1, beta1\n    for layer in layers:\n        dim"),
    ("sign of the second product lost", "mimetic.py", "- beta * identity", "+ beta * identity"),
    ("one Z for all heads", "mimetic.py",
     "[query_key(dim, head_dim, alpha1, beta1, generator) for _ in range(layer.heads)]",
     "[query_key(dim, head_dim, alpha1, beta1, generator)] * layer.heads"),
    ("both products from one SVD", "mimetic.py",
     "W_V, W_proj = value_proj(dim, alpha2, beta2, generator)",
     "W_V, W_proj = svd_split(-heads[-1][0] @ heads[-1][1].T, rank=dim)"),
    ("numpy's global generator", "mimetic.py",
     "torch.randn(dim, dim, generator=generator, device=\"cpu\", dtype=torch.float32)",
     "torch.from_numpy(__import__(\"numpy\").random.randn(dim, dim)).float()"),
    ("a silent no-op where no layer matched", "writing.py", "if not layers:", "if False:"),
]  # fmt: skip


def mutated(text: str, right: str, wrong: str) -> str:
    if text.count(right) != 1:
        raise ValueError(f"{right!r} stands {text.count(right)} times, not once: bring MISTAKES up to date.")
    return text.replace(right, wrong)


def first_failure(file: str, right: str, wrong: str) -> tuple[str, int]:
    """The first test that fails with the mistake made, and how many do."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".git", ".venv", "runs", "data", "__pycache__"),
            copy_function=shutil.copyfile,
        )
        (copy / file).write_text(mutated((copy / file).read_text("utf-8"), right, wrong), "utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "tests/test_mimetic.py", "tests/test_layouts.py"]
        report = subprocess.run(command, cwd=copy, capture_output=True, text=True).stdout
    failures = re.findall(r"^FAILED tests/(\S+?)::(\w+)", report, re.MULTILINE)
    return (failures[0][1], len(failures)) if failures else ("none!", 0)


def main() -> None:
    print("| mistake | made in | first test that fails | tests failing |\n|---|---|---|---|", flush=True)
    for words, file, right, wrong in MISTAKES:
        test, count = first_failure(file, right, wrong)
        print(f"| {words} | {file} | `{test}` | {count} |", flush=True)


if __name__ == "__main__":
    main()
