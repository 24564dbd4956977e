"""How the TP ranks of a replica exchange tensors: one file per implementation."""
