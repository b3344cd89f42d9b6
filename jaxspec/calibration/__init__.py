"""Offline calibration: which heads retrieve, and which of them choose the rows that Dustin reads."""
