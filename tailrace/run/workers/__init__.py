"""The worker processes of a separated run, one module for each kind."""
