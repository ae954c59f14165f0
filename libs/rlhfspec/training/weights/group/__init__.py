"""Weight transfer from trainer ranks to generators by `torch.distributed` groups (docs/training.md).

    generator                              trainer
    Ask     polls ten times a second  -->  membership and rank, result of the last order
    Begin   receives in a thread      <--  epoch, rendezvous address, header
    bucket  into uncommitted memory   <==  bucket by bucket, each rank its share
    Commit  keeps the version or not  <--  digests of buckets and of the whole

Orders use the trainer's gRPC server with the run's certificates; only buckets use the group.
"""
