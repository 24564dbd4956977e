"""The benchmark of RL systems: a workload's lengths and latencies, played by a whole run.

setup     a workload and a recipe ──▶ the trace to play, and the configuration of the run that plays it
single    one benchmark: a run of Tailrace, or an adapter's of another framework ──▶ events ──▶ figures
figures   what events say about time: stages, tail, throughput, workers
jobs      the file that an adapter reads
compare   two configurations in turns, with confidence intervals
tables    figures for people
"""
