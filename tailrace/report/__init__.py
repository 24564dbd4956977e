"""What a run leaves to look at: live display, sinks, HTML page, trace."""
