"""Workloads: what an RL step costs, without its texts.

trace              the schema of a trace: a sample with its lengths, times, turns and tool calls
files              traces as Parquet, and as JSON lines for people
parts              turns and tool calls, between lists and rows
run_trace          the trace of a run, from its events
importers          traces of others, each format a file
replay             a trace as the script of a run's responses
characterization   what a trace looks like, in figures
marginals          distributions of one amount
parameters         the parameters of a workload
parameter_files    these as YAML
fits               from a trace to parameters
samplers           from parameters, or from a trace, to new samples
library            the workloads that ship
"""
