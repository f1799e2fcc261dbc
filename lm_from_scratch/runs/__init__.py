"""Running in several processes, and keeping a run: services that a reader may skip.

``distributed`` joins the processes that torchrun started, ``sharded`` holds the optimizers for
weights that are cut into shares. Everything here may import the rooms to read; none of them imports
this one, except for training, which asks its processes.
"""
