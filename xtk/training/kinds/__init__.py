"""The kinds of runs of `xtk distill`: one module per kind, each of which opens and checks the inputs of a run."""
