"""Reads the traces of others.

base             what an importer is, and reading of records
factory          the importer of a format, and of a file
polytrace        PolyTrace: packed lengths, and conversations with tools
polytrace_fits   PolyTrace's distributions of its largest workloads, from which samples are drawn
groups           one line a group: its prompt's length and its responses'
services         requests of services: the Azure trace of 2023, Mooncake
servegen         ServeGen's rates and distributions of a service, from which requests are drawn
"""
