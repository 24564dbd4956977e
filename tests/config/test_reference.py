"""The reference page is written from the schemas, and every key has a description."""

from pathlib import Path

from tailrace.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run make docs"


def test_every_key_is_described() -> None:
    rows = [line for line in reference().splitlines() if line.startswith(("| `", "| **")) and line.count(" | ") == 2]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []


def test_a_section_has_its_own_defaults_and_description() -> None:
    page = reference()
    assert "| `cluster.reward.cpus` | `0.0` |" in page
    assert "| `cluster.rollout.cpus` | `1.0` |" in page
    assert "The rollout workers.\n\nEach has an engine, and generates.\n" in page


def test_a_variant_that_is_not_the_default_has_its_own_defaults() -> None:
    assert "| `queue.storage.max_bytes` | `68719476736` |" in reference()  # the default of spill; that of arena is less


def test_a_section_that_may_be_null_has_the_types_of_its_variants() -> None:
    page = reference()
    for name in ("history", "siblings", "features", "lambdarank", "model", "oracle"):
        assert f"### `rollout.lengths`, `type: {name}`\n" in page
    assert "### `rollout.http`\n" in page


def test_the_values_of_a_key_that_may_be_null_are_listed() -> None:
    (row,) = (line for line in reference().splitlines() if line.startswith("| `rollout.dispatch.order`"))
    assert row.endswith("One of `first_in`, `longest_first`, `shortest_first`. |")
