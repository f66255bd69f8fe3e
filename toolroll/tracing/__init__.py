"""Traces of trajectories, in the form of OpenTelemetry.

Spans are computed from a finished trajectory or its record. Their ids follow from the `request_id`, so that a tool call
can propagate its trace context before its span exists, and records can be exported later with the same ids.
"""
