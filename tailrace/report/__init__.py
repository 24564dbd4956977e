"""What a run leaves to look at: live display, metric sinks, HTML page, timeline. All of it is read from events."""
