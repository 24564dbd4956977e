"""Programs for developers: they set up an environment, and check that it can be set up from nothing."""
