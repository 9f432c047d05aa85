"""The packed codec of a teacher cache: ids as ranks, log-probabilities as levels, both in Huffman codes.

`docs/reference/codec.md` describes every bit, so that a stranger can read a cache without this code.
"""
