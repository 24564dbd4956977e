"""From a trace to the parameters of a workload.

choice     the distribution that describes an amount best
amounts    an amount with the share of its variance that the prompt explains
drift      a trend or a regime over steps
single     responses of one turn
turns      conversations with tools
workload   the whole workload
goodness   how near its samples come to the trace
"""
