"""`speccheck sweep`: which proposal length pays at which load.

`grid` says what is sent, `budget` which load takes the next round, `rounds` sends it and keeps what
came back; `calibration` and `cells` turn receipts into costs and verdicts, and are pure. Nothing is
gathered here: the matrix needs `cells` and none of the rest.
"""
