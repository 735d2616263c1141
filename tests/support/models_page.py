"""The tables of docs/models.md. `python -m tests.support.models_page` writes them anew."""

import re
from pathlib import Path

from jpaged.cli.models import markdown
from tests.tiny_models import TinyModel, models_of_blocks, tiny_models

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FAMILIES, TESTS = "jpaged models --markdown", "tests"


def shown(after: str) -> str:
    """What the page shows between a comment and the end."""
    found = re.search(rf"<!-- {after} -->\n(.*?)\n?<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def table_of_tests() -> str:
    """The configurations of each file of families."""
    by_file: dict[str, list[TinyModel]] = {}
    for case in (*tiny_models(), *models_of_blocks()):
        by_file.setdefault(case.family, []).append(case)
    rows = [f"| `{file}.py` | {', '.join(case.name for case in by_file[file])} |" for file in sorted(by_file)]
    return "\n".join(["| file in `jpaged/models/families` | configurations |", "|---|---|", *rows])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for after, table in ((FAMILIES, markdown()), (TESTS, table_of_tests())):
        page = page.replace(f"<!-- {after} -->\n{shown(after)}", f"<!-- {after} -->\n{table}")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
