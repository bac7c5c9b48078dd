"""Tests of replicas that exchange parameters."""
