"""Weights from the trainer's ranks to generators by process groups of `torch.distributed` (docs/weights.md).

    generator                                          trainer
    Ask     ten times a second: what is to be done? -->  whether it is in, and as what; what became of the last order
    Begin   receives in a thread of its own          <-- epoch, where to meet, what comes
    bucket  into memory that is no version yet       <== bucket after bucket, each rank its share
    Commit  all of it becomes a version, or nothing  <-- digests of buckets and of the whole

Generators call the trainer's gRPC server, by the run's own certificates; only buckets go by the group.
"""
