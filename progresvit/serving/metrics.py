"""Metrics for Prometheus."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from progresvit.engine.prediction import Prediction

if TYPE_CHECKING:
    from progresvit.serving.audit import EntropyDrift

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DECAY = 0.98
"""Weight of a batch in moving averages, relative to the next batch."""
OF_THE_SERVER = ("requests", "request_failures", "request_duration_seconds", "pending_requests")
"""Metrics of all requests, whatever their model. The first model counts them."""
ENTROPIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.5, 1.8, 2.1, 2.4)


class ServerMetrics:
    """What the server counts and measures. It observes the engine.

    Args:
        rounds: Number of rounds.
        drift: Compares the entropies of round 1 with the calibration; None for no comparison.
    """

    def __init__(self, rounds: int, drift: EntropyDrift | None = None) -> None:
        self._drift = drift
        self.registry = registry = CollectorRegistry()
        self.names = [str(number) for number in range(1, rounds + 1)]
        self.requests = Counter("progresvit_requests", "Requests, by status code.", ["code"], registry=registry)
        self.failures = Counter(
            "progresvit_request_failures", "Requests without an answer, by reason.", ["reason"], registry=registry
        )
        self.duration = Histogram(
            "progresvit_request_duration_seconds",
            "From the headers of a request to the end of its response.",
            buckets=SECONDS,
            registry=registry,
        )
        self.images = Counter(
            "progresvit_images",
            "Images answered, by the round after which they exited.",
            ["exit_round"],
            registry=registry,
        )
        self.batches = Counter("progresvit_batches", "Batches, by round.", ["round"], registry=registry)
        self.pending = Gauge("progresvit_pending_requests", "Requests that wait or run.", registry=registry)
        self.queue_limit = Gauge("progresvit_queue_limit_images", "Images that may wait or run.", registry=registry)
        self.entropy = Histogram(
            "progresvit_entropy", "Top-10 entropy of the answers.", buckets=ENTROPIES, registry=registry
        )
        self.disagreements = Counter(
            "progresvit_audit_disagreements",
            "Audited exits that the last round answers differently.",
            registry=registry,
        )
        self.audited = Counter("progresvit_audit_images", "Audited images.", registry=registry)
        self.audit_bound = Gauge(
            "progresvit_audit_bound",
            "Bound on the share of images that disagree, at all times.",
            ["side"],
            registry=registry,
        )
        self.audit_alarm = Gauge(
            "progresvit_audit_alarm", "1 after an alarm: every image runs all rounds.", registry=registry
        )
        self.drift = Gauge(
            "progresvit_entropy_drift",
            "Kolmogorov-Smirnov distance of the entropies of round 1 from the entropies of the calibration.",
            registry=registry,
        )
        self.splits = Counter(
            "progresvit_oom_splits", "Batches that were halved because memory ran out.", registry=registry
        )
        self._queue = [BatchHistogram(SECONDS) for _ in self.names]
        self._compute = [BatchHistogram(SECONDS) for _ in self.names]
        self._sizes = [BatchHistogram(SIZES) for _ in self.names]
        self._recent_images = self._recent_seconds = self._last_finish = 0.0
        registry.register(_PerRound(self))
        for name in self.names:  # the metrics have all rounds from the beginning
            self.images.labels(name)
            self.batches.labels(name)

    def update(self) -> None:
        """Measure what is measured when it is asked for."""
        self.drift.set(math.nan if self._drift is None else self._drift.distance())

    def answered(self, prediction: Prediction) -> None:
        self.images.labels(str(prediction.exit_round)).inc()
        self.entropy.observe(prediction.entropy)

    # Methods that the engine calls

    def started(self, s: int, waited: NDArray[np.float64]) -> None:
        self.batches.labels(self.names[s]).inc()
        self._recent_images = DECAY * self._recent_images + (len(waited) if s == 0 else 0)
        self._sizes[s].add(np.array([len(waited)]))
        self._queue[s].add(waited)

    def finished(self, s: int, seconds: float, entropy: NDArray[np.float32]) -> None:
        if s == 0 and self._drift is not None:
            self._drift.add(entropy)
        now = time.monotonic()
        busy = min(seconds, now - self._last_finish)  # batches in flight overlap
        self._recent_seconds, self._last_finish = DECAY * self._recent_seconds + busy, now
        self._compute[s].add(np.array([seconds]))

    def shrunk(self) -> None:
        self.splits.inc()

    def seconds_per_image(self) -> float | None:
        """Mean compute time of an image in recent batches; None before the first batch."""
        return self._recent_seconds / self._recent_images if self._recent_seconds and self._recent_images else None


def metrics_text(models: Mapping[str, ServerMetrics]) -> bytes:
    """The metrics of a server in the text format of Prometheus; those of several models have the label ``model``."""
    for metrics in models.values():
        metrics.update()
    if len(models) == 1:
        return generate_latest(next(iter(models.values())).registry)
    registry = CollectorRegistry()
    registry.register(_PerModel(models))
    return generate_latest(registry)


class _PerModel(Collector):
    """Collects the metrics of several models."""

    def __init__(self, models: Mapping[str, ServerMetrics]) -> None:
        self.models = models

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for model, metrics in self.models.items():
            for family in metrics.registry.collect():
                if family.name.removeprefix("progresvit_") in OF_THE_SERVER:
                    families.setdefault(family.name, family)
                    continue
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.samples.append(sample._replace(labels={"model": model, **sample.labels}))
        return list(families.values())


class BatchHistogram:
    """A histogram that takes many values at a time, from one thread."""

    def __init__(self, limits: tuple[float, ...]) -> None:
        self.limits, self.sum = np.array(limits), 0.0
        self._counts = np.zeros(len(limits) + 1, np.int64)

    def add(self, values: NDArray[Any]) -> None:
        places = np.searchsorted(self.limits, values)
        self._counts = self._counts + np.bincount(
            places, minlength=len(self._counts)
        )  # a new array: other threads read it
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, in the format of Prometheus."""
        return list(zip([*map(str, self.limits.tolist()), "+Inf"], self._counts.cumsum().tolist()))


class _PerRound(Collector):
    """Collects the histograms of the rounds."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> list[HistogramMetricFamily]:
        parts = (
            ("progresvit_queue_duration_seconds", "Time that images wait for a round.", self.metrics._queue),
            ("progresvit_compute_duration_seconds", "From the start of a batch to its answers.", self.metrics._compute),
            ("progresvit_batch_size", "Images of a batch.", self.metrics._sizes),
        )
        families = []
        for name, text, histograms in parts:
            family = HistogramMetricFamily(name, text, labels=["round"])
            for number, histogram in zip(self.metrics.names, histograms):
                family.add_metric([number], histogram.buckets(), histogram.sum)
            families.append(family)
        return families
