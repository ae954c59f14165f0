module rlhfspec.io/e2e/nats-server

go 1.26.0

require github.com/nats-io/nats-server/v2 v2.12.2
