"""The release packet: what was decided, and the evidence, as one HTML page, Markdown and JSON.

A packet has exactly three views (probability fixture, workload decision matrix, service latency),
then decisions and findings, regression cases, what was compared with what, and what it does not
prove. It is read by someone who was paged: verdict first, every "no" with its reason, and what was
not measured said in words.

Three steps, one way: `evidence` (records and plain dicts, as stages hand them over) -> `build`
(frozen `view` models, everything computed, nothing rounded) -> `pages` (Jinja and charts). Nothing
here reads a clock or draws a number: the same evidence gives the same bytes.
"""

from speccheck.packet.build import build_view
from speccheck.packet.evidence import RunEvidence
from speccheck.packet.pages import packet_json_schema, render
from speccheck.packet.view import PacketView

__all__ = ["PacketView", "RunEvidence", "build_view", "packet_json_schema", "render"]
