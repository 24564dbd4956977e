"""One file per engine implementation."""
