"""Records as bytes: protos/rlhfspec/wire/records.proto says the fields, `codec` translates."""
