"""NATS and Redis of a run with processes, their keys and certificates, and the cleanup after a dead supervisor.

The supervisor takes these steps, in this order (import from the modules; most runs need none of them):

    guardians = guardian.Guardians(uid, remove=[place, *scratch.paths])
    guardians.start()                     # two, so that one survives if the other dies with the supervisor
    scratch.make()                        # scratch.Scratch(uid, place): RUN/processes, and a folder in memory
    public_keys = certificates.create_credentials(place / "credentials", roles)       # {role: its NKEY's public part}
    users = {role: nats.User.of(public_keys[role], rights_of_that_role) for role in roles}
    nats_server = nats.NatsServer(place / "nats", run=uid, users=users,
                                  tls=certificates.ServerTls.of(place / "credentials", "nats"))
    redis_server = redis.RedisServer(place / "redis", run=uid, socket_folder=scratch.path,
                                     password_file=place / "credentials/redis.password")
    url = await nats_server.start()       # after a crash: the same port and data
    await nats_server.wait()              # for whatever restarts it; .pid, .url, await .stop()
    guardians.release()                   # after a clean end

Every process of the run must carry RLHFSPEC_RUN=uid in its environment, by which the guardians find it. A stage's
process connects with `certificates.client_tls(folder, role)` and `folder/ROLE.seed`.
"""
