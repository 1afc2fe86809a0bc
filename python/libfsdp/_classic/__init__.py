"""The classic wrapper, ``FullyShardedDataParallel``, on the engine of fully_shard: each wrapped module's parameters are
one line of elements, of which every rank holds an equal stretch."""
