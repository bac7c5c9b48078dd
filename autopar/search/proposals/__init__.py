"""Proposes divisions of many devices into stages: estimates of all, from placement programs of few layers."""
