"""Records as bytes: protos/rlhfspec/messages/wire/records.proto says the fields, `codec` translates."""
