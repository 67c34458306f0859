"""docs/examples.md is what the files of examples/ say of themselves."""

from tools.gallery_page import PAGE, page


def test_the_gallery_is_that_of_the_examples() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: `python -m tools.gallery_page`"
