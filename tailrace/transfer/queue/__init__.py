"""The transfer queue: a streaming store of rows between tasks (AsyncFlow, section 3)."""
