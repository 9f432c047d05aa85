"""The Python API: the objects of `import xtk`, built of the same parts as the commands."""
