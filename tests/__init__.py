"""Tests of jattn: a float64 oracle, one table of cases, and one body of tests for every implementation."""
