"""Worker processes: where they run, and how their deaths are handled. No other package imports Ray."""
