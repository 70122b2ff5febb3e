"""Replay beyond sending: whether answers are as good, and whether they are the target's.

`grades` grades answers and runs doubtful cases again, `attribution` makes regression cases of them
and asks the target about each first difference, `distributions` holds sampled answers against the
target's law (`speccheck probe` too), `preferences` is for judges and reviewers.
"""
