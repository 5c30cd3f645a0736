"""docs/robustness.md names tests that exist, and every case that a test of these files names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = (ROOT / "docs" / "robustness.md").read_text()
ROWS = dict(re.findall(r"^\| (\d+) \|(.*)\|$", TABLE, re.MULTILINE))


def docstrings_of_tests(file: Path) -> dict[str, str]:
    """The tests of a file by name, with their docstrings."""
    tree = ast.parse(file.read_text())
    return {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_test_in_the_table_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    assert len(named) > len(ROWS) > 70
    missing = [
        f"{path}::{name}" for path, name in named if not (ROOT / path).exists() or name not in docstrings_of_tests(ROOT / path)
    ]
    assert not missing, f"docs/robustness.md names tests that do not exist: {missing}"


def test_every_row_has_a_test():
    for case, row in ROWS.items():
        assert "::test_" in row, f"case {case} of docs/robustness.md names no test"


def test_every_case_that_a_test_names_has_it_in_its_row():
    found = 0
    for file in sorted((ROOT / "tests").glob("test_field_*.py")):
        for name, text in docstrings_of_tests(file).items():
            cases = re.match(r"Cases? (\d+)(?: and (\d+))?\.", text)
            if cases is None:
                assert file.stem == Path(__file__).stem, f"{file.name}::{name} names no case in its docstring"
                continue
            for case in filter(None, cases.groups()):
                found += 1
                where = f"`tests/{file.name}::{name}`"
                assert where in ROWS.get(case, ""), f"docs/robustness.md: the row of case {case} lacks {where}"
    assert found > 60
