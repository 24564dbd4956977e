"""A queue in processes of its own.

supervisor   starts controller and units, and starts them again     serve     what each process runs
child        one of these processes                                 metrics   counts for Prometheus
preflight    what is checked before any process starts
"""
