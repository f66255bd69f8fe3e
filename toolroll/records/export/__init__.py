"""Conversion of records to other formats."""
