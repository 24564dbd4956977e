"""What a plan or a simulation runs on, in plain numbers.

base        devices in pools, pools in clusters, and the links between them
catalogue   the kinds of devices that are known, by name
clusters    a cluster from a text such as 64xH100, or from a file
"""
