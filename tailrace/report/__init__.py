"""The records of a run for people: live display, metric sinks, HTML page, timeline. All of them are made from
events."""
