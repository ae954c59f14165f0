"""Serialisation of records, whose fields records.proto defines."""
