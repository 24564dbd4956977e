"""The page of every key is the schemas', and every key says what it is."""

from pathlib import Path

from tailrace.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run make docs"


def test_every_key_is_described() -> None:
    rows = [line for line in reference().splitlines() if line.startswith(("| `", "| **"))]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
