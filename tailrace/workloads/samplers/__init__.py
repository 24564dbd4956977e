"""Workloads to draw samples from.

base            what a workload is
recorded        groups of a trace, drawn again
fitted          parameters, from which samples are drawn
scores          normal scores: how the samples of a prompt are made alike
single          draws responses of one turn
conversations   draws turns with tools
factory         the workload of a name or a file, and the library
"""
