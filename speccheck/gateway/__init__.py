"""An OpenAI-compatible proxy in front of the two arms that makes decisions take effect.

asked    what a request asks for, as far as it decides where it goes
board    decisions, from the one process that takes them to the workers that obey them
choose   one request, one decision: policy, kill switch, route state, sticky share
joint    a running answer continued from its token ids: no lost and no doubled text
relay    one request through to an arm and back, handed over where that arm fails
app      the ASGI application: what is served here and what is passed on
outbox   receipts on their way to the store, bounded, losses counted
worker   one serving process
exercise the hand-over tried on purpose, for the canary
server   the parent: workers, route states, the only writer of the store
"""
