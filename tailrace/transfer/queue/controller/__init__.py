"""The controller of a queue across processes: who may have which row, who is alive, and what survives."""
