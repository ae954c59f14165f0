"""Weights from the trainer's ranks to generators by process groups of `torch.distributed` (docs/training.md).

    generator                                          trainer
    Ask     ten times a second: what is the order?   --> membership and rank; result of the last order
    Begin   receive in a thread                      <-- epoch, meeting address, header
    bucket  into memory that is no version yet       <== bucket after bucket, each rank its share
    Commit  keep all as a version, or nothing        <-- digests of buckets and of the whole

Orders go over the trainer's gRPC server with the run's certificates; only buckets go by the group.
"""
