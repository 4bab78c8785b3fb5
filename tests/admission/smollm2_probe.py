"""Probes of SmolLM2-135M's stages in this process, for the test and the benchmark."""

from __future__ import annotations

from pathlib import Path
from random import Random

import trio

from meshd.admission.book import Subject
from meshd.admission.exam import sit
from meshd.admission.expected import RecordedModel
from meshd.admission.prober import judged, request_for
from meshd.admission.qspec import GoldenPrompt, Judgement
from meshd.inference.worker.record_qspec import record
from meshd.models.manifest import read_manifest
from meshd.models.qspec_file import QspecFile
from meshd.vocabulary import ModelSpec, NodeId
from tests.admission.stage_engine import StageEngine


def expectation(folder: Path, scratch: Path) -> tuple[RecordedModel, ModelSpec]:
    """What is expected of the model in ``folder``; recorded if it has no qspec."""
    spec = read_manifest(folder).spec
    path = folder / "qspec.safetensors"
    if not path.is_file():
        path = record(folder, scratch / "qspec.safetensors")
    qspec = QspecFile(path, spec)
    golden = [GoldenPrompt(each.ids, each.argmax, each.margin) for each in qspec.golden]
    return RecordedModel(golden, qspec.rows, hidden_size=spec.hidden_size, num_layers=spec.num_layers), spec


def probe(engine: StageEngine, expected: RecordedModel, seed: int) -> Judgement:
    """One probe, judged as a peer would."""
    info = engine.info
    cases = expected.cases(info.layers, info.dtype, Random(seed))
    subject = Subject(NodeId("a" * 32), 1, info.generation, info.layers, info.spec.digest)
    answer = trio.run(sit, engine, request_for(subject, cases))
    return judged(answer, cases, expected, info.dtype)
