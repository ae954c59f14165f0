"""One trace a sample, over all processes: where its time went, written into the run folder and sent out by OTLP."""
