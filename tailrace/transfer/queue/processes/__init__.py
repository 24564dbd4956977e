"""A queue in separate processes.

supervisor   starts and restarts controller and units     serve     the program of each process
plan         the settings and places of the processes     vitals    deaths, and when a restart is due
child        the parent's end of one process              metrics   counts for Prometheus
preflight    checks before any process starts             added     a unit that joins from outside, and leaves
several      several controllers, each with its units
"""
