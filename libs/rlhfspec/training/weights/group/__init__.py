"""Weights from the trainer's ranks to generators by process groups of `torch.distributed` (docs/weights.md).

    trainer                                          generator
    Ask     every second: is it in, and as what? --> the way that was quicker
    Begin   epoch, where to meet, what comes     --> receives in a thread of its own
    bucket after bucket, each rank its share     ==> into memory that is no version yet
    Commit  digests of buckets and of the whole  --> compared: all of it becomes a version, or nothing does

Calls go to the worker's gRPC server, by the run's own certificates; only buckets go by the group.
"""
