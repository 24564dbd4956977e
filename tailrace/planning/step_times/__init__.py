"""Seconds of the work of engines and trainers on hardware that need not be there.

operators    what a forward pass computes, reads and exchanges
rates        the parts of a device's peak rates that kinds of operators reach
collectives  seconds of exchanges among devices
generation   an engine's steps, added up over operators
training_setup  what a trainer trains, in which layout, and on how much at once
training     a trainer's work, added up over operators
"""
