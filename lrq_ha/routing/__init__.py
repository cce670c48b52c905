"""Multi-site log replication over routing queues: the pure part (no I/O, no clock, no randomness).

The chain
    A receive queue `LRQ_Recv_<client_name>_<remote_id>` gets the source group's log, filtered, **in log order**. From one
    (client, destination) pair's point of view the log holds

      - deltas                    in LRQ_Send_LogEntries;
      - full sync requests        status entries; the position of a request is its snapshot's **base**;
      - the snapshot's data       in LRQ_Send_SnapSync, with the request's id, the last with type LAST_FULL_SYNC_ENTRY.

    A session merges them by position. A request becomes the snapshot's **start marker**: a transaction of type SNAPSHOT_SYNC
    without payloads, with the request's id, at the base. Data of any other request than the last marker's is left
    out; deltas go on in between. So positions grow without exception, no data waits for a slow provider, and the
    chain is (except the empty snapshot below) a function of the log: a new primary continues at the position that the sink reports.
    Each batch names the transaction before it in this queue (`previous`), so that the sink sees a gap and refuses it.

Restarts
    If the log no longer holds the next transaction (trimmed), or the sink has nothing or holds another history, the chain restarts
    at a start marker whose batch says `previous` = (0, 0). No other hole is possible, and a snapshot follows it.
    A client that is known to have no full sync provider, and whose last snapshot is not whole in the log, or has lost rows since,
    gets an **empty snapshot** instead: a LAST_FULL_SYNC_ENTRY without start marker and without payloads, at the position before
    the first delta that is left, then all deltas from there. A sink that has part of a snapshot, and no whole one, is sent
    another start marker and, if that request is cancelled without an answer, an end marker, which makes a whole empty
    snapshot of it.

The rule for readers of a receive queue (Receiver, Spark)
    1. Positions are compared as (epoch, sequence). Skip a transaction whose position is not greater than the greatest seen.
    2. A SNAPSHOT_SYNC transaction without payloads is a start marker: snapshot `request_id` begins, its base is this position;
       rows of a snapshot that began before and has not ended are dropped. SNAPSHOT_SYNC rows up to the end marker are its rows.
    3. LAST_FULL_SYNC_ENTRY ends it (payloads that it carries are the snapshot's last rows). Without a start marker of its
       request_id it is a whole, empty snapshot, and its own position is the base.
    4. Tables = rows of the newest *completed* snapshot, then every delta with a position greater than **its base**, in order:
       deltas that came while it was under way are applied after it. A snapshot that was given up (begun, never ended) changes
       nothing. Before the first completed snapshot there are no tables.
    5. After a start marker whose batch has `previous` = (0, 0) there is a hole before it: deltas from there on must wait for
       the next end marker and must not be applied to the older tables.
    6. A transaction may have no payloads (markers): a reader that turns payloads into rows gives a marker one row without payload.
"""
