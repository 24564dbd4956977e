"""A queue in processes of its own.

supervisor   starts controller and units, and starts them again     serve     what each process runs
plan         what shall run, and where                              vitals    who has died, and when it is due again
child        one of these processes                                 metrics   counts for Prometheus
preflight    what is checked before any process starts
"""
