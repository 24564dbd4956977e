"""Programs for developers: they set up an environment, and prove that it can be set up from nothing."""
