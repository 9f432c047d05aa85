"""The Python API: what `import xtk` offers, in terms of the parts that the commands are built of."""
