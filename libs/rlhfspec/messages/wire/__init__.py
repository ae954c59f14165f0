"""Serialisation of records: protos/rlhfspec/messages/wire/records.proto defines the fields, `codec` translates."""
