"""Use of xtk in the training loops of other libraries: one module per library."""
