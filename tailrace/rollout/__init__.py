"""The stream generation service: one object in front of all engines of a run.

base     the port of an engine: what the service gives to it, and what comes back
local    the port of an engine in this process; a worker serves it to the driver
service  places requests on engines, and streams their samples as they finish
gate, updater   hold responses back until their weights are there, and install new weights
"""
