"""Sources of prompts: one file for each kind of source."""
