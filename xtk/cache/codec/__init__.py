"""The packed codec of teacher caches: ids and quantized log-probabilities, entropy-coded with ANS.

`docs/reference/codec.md` specifies every bit, so that other programs can read a cache.
"""
