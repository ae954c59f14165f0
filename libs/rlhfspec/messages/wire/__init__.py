"""Serialisation of records: records.proto defines the fields, `codec` translates."""
