"""Programs for developers: they set up an environment, check that, and hold the rules of the layout."""
