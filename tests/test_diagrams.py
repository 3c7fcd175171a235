"""The drawings of README are those of today's imports and constants, and legible in light and dark mode."""

import xml.etree.ElementTree as ElementTree

import diagrams


def luminance(colour: str) -> float:
    """Relative luminance of "#rrggbb", as WCAG defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(a: str, b: str) -> float:
    lighter, darker = sorted((luminance(a), luminance(b)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_drawings_in_results_are_those_of_today():
    for name in ("layer", "files"):
        stored = (diagrams.ROOT / "results" / f"{name}.svg").read_text("utf-8")
        assert stored == getattr(diagrams, name)(), "python diagrams.py draws them anew"
        ElementTree.fromstring(stored)


def test_every_file_at_the_top_is_on_the_map_and_arrows_run_one_way():
    known = diagrams.modules()
    drawn = diagrams.files()
    for file in diagrams.ROOT.glob("*.py"):
        assert f">{file.name}</text>" in drawn or file.stem in ("run", "diagrams")
    levels = {name: i for i, row in enumerate(diagrams.rows(known)) for name in row}
    assert all(levels[name] < levels[other] for name in known for other in known[name])
    assert known["mimetic"] == {"writing", "verify"} and known["layouts"] == set()
    assert not diagrams.imports(diagrams.ROOT / "training" / "loop.py") & known.keys()


def test_text_is_legible_in_light_and_dark_mode():
    for colours in (diagrams.LIGHT, diagrams.DARK):
        for ground in ("card", "box", "qk", "vp"):
            assert contrast(colours["ink"], colours[ground]) >= 7
        assert contrast(colours["line"], colours["card"]) >= 4.5
