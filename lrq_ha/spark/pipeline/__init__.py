"""The pipeline: receive queues -> tables on disk that follow them, version by version, each transaction exactly once.

How it works, in the order of the data:

    batch      entries of some queues, from a stream or a batch read; it may be a repeat, and may be cut between any two transactions
    changes    entries -> decoded rows, and a summary of them (Spark; the summary alone reaches the driver)
    progress   a queue's state + its part of the summary -> what to apply, what to stage, the next state (pure)
    apply      rewrites the buckets that are touched, and stages the rows of snapshots that have not ended (Spark)
    store      commits all of it as one version

`rebuild` computes one table again from what the queues hold. `history` and `report` tell of all this, and change nothing.

Invariants:

- A version is one file, `_versions/N.json`, and is there as a whole or not at all. It names all data files, and for each queue the position applied.
- A version's files never change. They are removed some time after newer versions replaced it.
- Rows at or below a queue's position are skipped. So a batch may be repeated, and a job may be killed at any instant.
"""
