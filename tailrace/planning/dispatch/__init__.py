"""Decides which engine generates which prompts, and in which order.

    jobs, engines ──Policy.place──▶ for each engine its jobs in the order of their start

base        what is placed, and where
seconds     predicts how long an engine takes with some jobs
simple      policies that know no lengths
skewness    StreamRL's Algorithm 2, as it is written
balanced    the least predicted makespan
moving      which running responses go on at another engine

Numbers in, places out: the service of a run and a simulation call the same code.
"""
