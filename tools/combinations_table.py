"""Write the table of tried torch versions in docs/install.md from tests/combinations.json.

python tools/combinations_table.py
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "install.md", ROOT / "tests" / "combinations.json"
ABOUT = {"torch": "torch", "extra": "extra", "nvrtc": "NVRTC", "python": "Python"}  # what comes before the steps
NONE = "No combination of torch and NVRTC has been recorded yet.\n"
_BLOCK = re.compile(r"(<!-- combinations -->\n).*?(<!-- /combinations -->)", re.DOTALL)


def table(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return a line for each torch: its versions, and what became of each step."""
    if not results:
        return NONE
    left_out = {*ABOUT, "cupy"}
    steps = list(dict.fromkeys(step for each in results.values() for step in each if step not in left_out))
    lines = [[*ABOUT.values(), *steps], ["---"] * (len(ABOUT) + len(steps))]
    for torch, each in results.items():
        about = {"torch": torch, **each}
        lines.append([*[about.get(name, "") for name in ABOUT], *[each.get(step, "") for step in steps]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def recorded() -> dict[str, dict[str, str]]:
    """Return what was tried; nothing where there is no record."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def filled(text: str, results: Mapping[str, Mapping[str, str]]) -> str:
    """Return a page with the table between its markers."""
    return _BLOCK.sub(lambda match: match[1] + table(results) + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), recorded()), encoding="utf-8", newline="\n")
