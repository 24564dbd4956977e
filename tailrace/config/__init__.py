"""Configuration: one frozen schema file per package. Imports no torch."""
