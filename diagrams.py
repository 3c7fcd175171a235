"""The two drawings of README: what a layer starts as, and which file imports which.

python diagrams.py            writes results/layer.svg and results/files.svg

Each lies on a card of its own, light, or dark for readers whose system asks for that, so it is legible on any page.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent
# text, lines, card, box, and the boxes that matter: dark on light, then light on dark
LIGHT = dict(ink="#1f2328", line="#59636e", card="#f6f8fa", box="#ffffff", qk="#ffe08a", vp="#bcd7f7")
DARK = dict(ink="#f0f3f6", line="#9198a1", card="#161b22", box="#21262d", qk="#5f4a00", vp="#0b3d75")

LAYER = [  # x, y, width, height, class, lines of text
    (20, 150, 150, 70, "box", ["tokens X + P", "P: sinusoids"]),
    (200, 150, 100, 70, "box", ["LayerNorm"]),
    (340, 40, 300, 90, "qk", ["W_Q W_Kᵀ of a head: who looks at whom", "≈ α₁Z + β₁I, rank k", "itself and neighbours"]),
    (340, 240, 300, 90, "vp", ["W_V W_proj: what is done with it", "= α₂Z − β₂I", "take a little of it away"]),
    (690, 150, 150, 70, "box", ["map · tokens", "added to X"]),
    (870, 150, 110, 70, "box", ["LayerNorm,", "MLP; added"]),
]
ARROWS = [(170, 185, 200, 185), (300, 175, 340, 85), (300, 195, 340, 285), (640, 85, 690, 175), (640, 285, 690, 195)]
ARROWS += [(840, 185, 870, 185), (980, 185, 1010, 185)]
NOTE = "Coloured: what the init sets. Images: α₁ = β₁ = 0.7, α₂ = β₂ = 0.4. Text: α₁ = 0, β₁ = 0.5, α₂ = β₂ = 0.2."

SHELVES = ("training", "inputs")  # what all scripts stand on: a bar instead of arrows


def modules() -> dict[str, set[str]]:
    """Name of each module and package at the top -> those that it imports, without SHELVES, run.py and this file."""
    names = {file.stem: [file] for file in ROOT.glob("*.py") if file.stem not in ("run", "diagrams")}
    names |= {file.parent.name: list(file.parent.glob("*.py")) for file in ROOT.glob("*/__init__.py")}
    names = {name: names[name] for name in sorted(names) if name not in SHELVES}
    return {name: set().union(*map(imports, files)) & names.keys() - {name} for name, files in names.items()}


def imports(file: Path) -> set[str]:
    found = list(ast.walk(ast.parse(file.read_text("utf-8"))))
    names = [node.module for node in found if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in found if isinstance(node, ast.Import) for alias in node.names]
    return {name.split(".")[0] for name in names}


def below(name: str, known: dict[str, set[str]]) -> set[str]:
    """All that a module imports, and that those import in turn."""
    return known[name].union(*(below(other, known) for other in known[name]))


def rows(known: dict[str, set[str]]) -> list[list[str]]:
    """The modules by the longest way down to them: scripts that nothing imports first, the method last."""

    def level(name: str) -> int:
        return 1 + max((level(other) for other in known if name in known[other]), default=-1)

    levels = {name: level(name) for name in known}
    return [[name for name in known if levels[name] == i] for i in range(max(levels.values()) + 1)]


# ---- drawing


def box(x: float, y: float, width: float, height: float, kind: str, lines: list[str]) -> str:
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    texts = [f'<text x="{x + width / 2}" y="{first + 18 * i}">{line}</text>' for i, line in enumerate(lines)]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>' + "".join(texts)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" marker-end="url(#tip)"/>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    def style(c: dict[str, str]) -> str:
        fills = "".join(f".{kind}{{fill:{c[kind]};stroke:{c['line']}}}" for kind in ("card", "box", "qk", "vp"))
        return f"{fills}text{{fill:{c['ink']}}}line{{stroke:{c['line']}}}.tip{{fill:{c['line']}}}"

    fonts = "text{font:14px sans-serif;text-anchor:middle}line{stroke-width:1.2}"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>',
        f"<style>{fonts}{style(LIGHT)}@media(prefers-color-scheme:dark){{{style(DARK)}}}</style>",
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0 0L8 4L0 8z"/></marker>',
        f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10"/>', *parts, "</svg>\n",
    ])  # fmt: skip


def layer() -> str:
    title = "A layer: W_Q W_K^T starts near beta1 I, W_V W_proj at minus beta2 I, both with noise"
    note = f'<text x="510" y="368">{NOTE}</text>'
    return svg(1020, 390, title, [*(arrow(*ends) for ends in ARROWS), *(box(*shape) for shape in LAYER), note])


def files() -> str:
    known, at, boxes, lines = modules(), {}, [], []
    levels, bottom = rows(known), 80 * len(rows(known)) + 20
    for level in reversed(range(len(levels))):  # a box stands over the middle of those that it imports
        wish = {name: [at[other][0] for other in known[name]] or [480] for name in levels[level]}
        names = sorted(wish, key=lambda name: sum(wish[name]) / len(wish[name]))
        start = 480 - 75 * (len(names) - 1)
        at |= {name: (start + 150 * i + 40 * (level % 2), 80 * level + 20) for i, name in enumerate(names)}
    for name, (x, y) in at.items():
        file = name + ("/" if (ROOT / name).is_dir() else ".py")
        boxes.append(box(x - 65, y, 130, 36, "qk" if name == "mimetic" else "box", [file]))
    boxes.append(box(30, bottom, 920, 36, "vp", ["training/, inputs/: settings, steps, logs; data. For all scripts"]))
    for name, others in known.items():
        indirect = set().union(*(below(other, known) for other in others))
        lines += [arrow(at[name][0], at[name][1] + 36, *at[other]) for other in sorted(others - indirect)]
    title = "Which file imports which, from the scripts down to mimetic.py and layouts.py"
    return svg(980, bottom + 56, title, lines + boxes)


if __name__ == "__main__":
    for name, drawing in (("layer", layer()), ("files", files())):
        (ROOT / "results" / f"{name}.svg").write_text(drawing, encoding="utf-8")
