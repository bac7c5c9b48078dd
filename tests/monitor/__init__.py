"""Tests of autopar.monitor."""
