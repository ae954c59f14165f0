"""NATS and Redis of a run with processes, their keys and certificates, and what cleans up after a dead supervisor.

What the supervisor does, in this order (imports stay in their modules, for most runs need none of them):

    guardians = guardian.Guardians(uid, remove=[place, *scratch.paths])
    guardians.start()                     # two, so that one is left when the other dies together with us
    scratch.make()                        # scratch.Scratch(uid, place): RUN/processes, and a folder in memory
    public_keys = certificates.create_credentials(place / "credentials", roles)       # {role: its NKEY's public part}
    users = {role: nats.User.of(public_keys[role], rights_of_that_role) for role in roles}
    nats_server = nats.NatsServer(place / "nats", run=uid, users=users,
                                  tls=certificates.ServerTls.of(place / "credentials", "nats"))
    redis_server = redis.RedisServer(place / "redis", run=uid, socket_folder=scratch.path,
                                     password_file=place / "credentials/redis.password")
    url = await nats_server.start()       # also after it ended: the same port, the same data
    await nats_server.wait()              # for what restarts it; .pid, .url, await .stop()
    guardians.release()                   # the run ended as it should: nothing is left to kill

Every server carries RLHFSPEC_RUN=uid in its environment, as every process of the run must: the guardians find them
by it. A stage's process connects with `certificates.client_tls(folder, role)` and `folder/ROLE.seed`.
"""
