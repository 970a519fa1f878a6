"""Predicts memory and time of a layout: closed forms over plain numbers, without a model or a process."""
