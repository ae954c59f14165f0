"""Control of a run in a cluster: opens it on the bus, observes it and reports to the operator."""
