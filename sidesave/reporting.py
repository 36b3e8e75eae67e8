"""What saves have cost and what became of them: statistics, metrics, traces, reports and records."""

from sidesave.client.reading.verify import VerifyReport
from sidesave.client.reporting.prometheus import prometheus_text, write_prometheus_file
from sidesave.client.reporting.stats import SaveEvent, SaveStats, SaveSummary
from sidesave.client.reporting.trace import Trace
from sidesave.client.training.intervals import Advice
from sidesave.writer_daemon.log import SaveRecord

__all__ = [
    "Advice",
    "SaveEvent",
    "SaveRecord",
    "SaveStats",
    "SaveSummary",
    "Trace",
    "VerifyReport",
    "prometheus_text",
    "write_prometheus_file",
]
