"""NATS and Redis of a run with processes, their keys and certificates, and who cleans up after a dead supervisor.

What the supervisor does, in this order (imports stay in their modules, for most runs need none of them):

    public_keys = certificates.create_credentials(folder / "credentials", roles)      # {role: its NKEY's public part}
    users = {role: nats.User.of(public_keys[role], rights_of_that_role) for role in roles}
    nats_server = nats.NatsServer(folder / "nats", run=uid, users=users,
                                  tls=certificates.ServerTls.of(folder / "credentials", "nats"))
    redis_server = redis.RedisServer(folder / "redis", run=uid, password_file=folder / "credentials/redis.password")
    guardian = Guardian(uid, remove=[*nats_server.data, *redis_server.data, shared_memory_folder]); guardian.start()
    url = await nats_server.start()       # also after it ended: the same port, the same data
    await nats_server.wait()              # for who restarts it; .pid, .url, await .stop(), .remove()
    guardian.release()                    # the run ended as it should: nothing is left to kill

Every server carries RLHFSPEC_RUN=uid in its environment, as every process of the run must: the guardian finds them by
it. A stage's process connects with `certificates.client_tls(folder, role)` and `folder/ROLE.seed`.
"""
