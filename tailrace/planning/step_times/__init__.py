"""Seconds of the work of engines and trainers on hardware that need not be there.

operators    what a forward pass computes, reads and exchanges
rates        the parts of a device's peak rates that kinds of operators reach
collectives  seconds of exchanges among devices
base         what a simulated engine asks of step times
basis        what step times rest on, and how far they may be from the truth
generation   an engine's steps, added up over operators
kernels      an engine's steps, added up over kernels that were measured
profiled     an engine's steps as its own profile has them; `predicted_profile`: such a profile of predicted steps
calibrated   analytic steps, scaled by measured ones
training_setup  what a trainer trains, in which layout, and on how much at once
training     a trainer's work, added up over operators
"""
