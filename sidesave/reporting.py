"""The costs and outcomes of saves: statistics, metrics, traces, reports and records."""

from sidesave.client.cost import CostEstimate
from sidesave.client.reading.verify import VerifyReport
from sidesave.client.reporting.prometheus import prometheus_text, write_prometheus_file
from sidesave.client.reporting.stats import SaveStats, SaveSummary, describe
from sidesave.client.reporting.trace import Trace
from sidesave.client.training.intervals import Advice
from sidesave.writer_daemon.save_record import SaveRecord

__all__ = [
    "Advice",
    "CostEstimate",
    "SaveRecord",
    "SaveStats",
    "SaveSummary",
    "Trace",
    "VerifyReport",
    "describe",
    "prometheus_text",
    "write_prometheus_file",
]
