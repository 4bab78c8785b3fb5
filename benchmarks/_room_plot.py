"""The experiment as a picture: tokens per second, each answer, and the strikes, over one time axis. SVG, written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from meshd.cli.chaos import verdict
from meshd.cli.chaos.experiment import Report
from meshd.cli.chaos.schedule import OUTAGE, Strike

WIDTH, LEFT, RIGHT = 1100, 70, 16
TOP, CURVE, ROW = 54, 170, 15
INK, FAINT = "#24292f", "#8c959f"
STRIKES = {"reset": "#d1242f", "silence": "#bf8700", OUTAGE: "#8250df"}
ANSWERS = {verdict.RIGHT: "#1a7f37", verdict.HONEST: "#0969da"}  # the rest is a fault
FAULT = "#24292f"


def plot(report: Report, title: str) -> str:
    """The whole document."""
    picture = _Picture(report)
    height = picture.bottom + 46
    body = "\n".join(
        [*picture.frame(title), *picture.strikes(), *picture.throughput(), *picture.answers(), *picture.axis()]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' font-family="system-ui, sans-serif" font-size="12" fill="{INK}">\n'
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


class _Picture:
    """Places of things. From the top: title, throughput, a row for each node with its strikes, answers."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.nodes = list(report.places)
        self.from_s = report.calm_from_s
        self.until_s = max(report.end_s, self.from_s + 1.0)
        self.rows_top = TOP + CURVE + 22
        self.answers_top = self.rows_top + ROW * len(self.nodes) + 14
        self.bottom = self.answers_top + 26

    def x(self, at_s: float) -> float:
        share = (min(max(at_s, self.from_s), self.until_s) - self.from_s) / (self.until_s - self.from_s)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def frame(self, title: str) -> Iterator[str]:
        yield f'<text x="{LEFT}" y="20" font-size="15" font-weight="600">{escape(title)}</text>'
        figures = self.report.figures()
        counts = ", ".join(f"{count} {name}" for name, count in figures["outcomes"].items() if count)
        told = escape(f"{figures['requests']} requests: {counts}")
        yield f'<text x="{LEFT}" y="38" fill="{FAINT}">{told}</text>'
        x = WIDTH - 400
        for name, colour in STRIKES.items():
            yield f'<rect x="{x}" y="29" width="10" height="10" fill="{colour}"/><text x="{x + 14}" y="38">{name}</text>'
            x += 74
        for name, colour in ((verdict.HONEST, ANSWERS[verdict.HONEST]), ("fault", FAULT)):
            yield f'<circle cx="{x + 5}" cy="34" r="4" fill="{colour}"/><text x="{x + 14}" y="38">{name}</text>'
            x += 94

    def throughput(self) -> Iterator[str]:
        seconds = verdict.each_second(self.report.answers, self.until_s)
        first, last = int(self.from_s), int(self.until_s)
        shown = seconds[first:last]
        top = max([*shown, 1])
        step = 10 if top <= 60 else 50 if top <= 300 else 200
        for value in range(0, top + 1, step):
            y = self._y(value, top)
            yield f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#eaeef2"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" fill="{FAINT}">{value}</text>'
        points = " ".join(f"{self.x(first + i + 0.5)},{self._y(value, top)}" for i, value in enumerate(shown))
        yield f'<polyline points="{points}" fill="none" stroke="#0969da" stroke-width="1.5"/>'
        yield f'<text x="{LEFT}" y="{TOP + 2}" fill="{FAINT}">tokens/s, all clients</text>'

    def _y(self, value: float, top: float) -> float:
        return round(TOP + 10 + (CURVE - 10) * (1 - value / top), 1)

    def strikes(self) -> Iterator[str]:
        for i, name in enumerate(self.nodes):
            y = self.rows_top + ROW * i
            told = f"{name} {self.report.places[name] or '-'}"
            yield f'<text x="{LEFT - 6}" y="{y + 11}" text-anchor="end" font-size="10">{told}</text>'
            yield f'<rect x="{LEFT}" y="{y + 2}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 4}" fill="#f6f8fa"/>'
        for one in self.report.done:
            yield from self._strike(one)

    def _strike(self, one: Strike) -> Iterator[str]:
        colour = STRIKES[OUTAGE if one.kind == OUTAGE else "silence" if one.silent else "reset"]
        x = self.x(one.at_s)
        width = max(2.0, round(self.x(one.end_s) - x, 1))
        if one.kind == OUTAGE:
            yield f'<rect x="{x}" y="{TOP + 10}" width="{width}" height="{CURVE - 10}" fill="{colour}" opacity="0.12"/>'
        for name in one.nodes:
            y = self.rows_top + ROW * self.nodes.index(name)
            tip = escape(f"{one.kind} {name} at {one.at_s:.1f} s for {one.for_s:.1f} s")
            yield f'<rect x="{x}" y="{y + 2}" width="{width}" height="{ROW - 4}" fill="{colour}"><title>{tip}</title></rect>'

    def answers(self) -> Iterator[str]:
        """Right ones as ticks; the others large, so that none is overlooked."""
        y = self.answers_top
        yield f'<text x="{LEFT - 6}" y="{y + 14}" text-anchor="end" font-size="10">answers</text>'
        ticks = [
            f"M{self.x(one.ended_s)} {y + 4}v12"
            for one in self.report.answers
            if self.report.judge(one) == verdict.RIGHT
        ]
        yield f'<path d="{"".join(ticks)}" stroke="{ANSWERS[verdict.RIGHT]}" stroke-width="0.7" opacity="0.5"/>'
        for one in self.report.answers:
            outcome = self.report.judge(one)
            if outcome != verdict.RIGHT:
                colour = ANSWERS.get(outcome, FAULT)
                tip = escape(f"{outcome} at {one.ended_s:.1f} s: {one.message}")
                yield f'<circle cx="{self.x(one.ended_s)}" cy="{y + 10}" r="4" fill="{colour}"><title>{tip}</title></circle>'

    def axis(self) -> Iterator[str]:
        span = self.until_s - self.from_s
        step = 10 if span <= 150 else 30 if span <= 400 else 60
        for i in range(int(span / step) + 1):
            x = self.x(self.from_s + i * step)
            yield f'<line x1="{x}" y1="{self.bottom}" x2="{x}" y2="{self.bottom + 5}" stroke="{FAINT}"/>'
            yield f'<text x="{x}" y="{self.bottom + 18}" text-anchor="middle" fill="{FAINT}">{i * step} s</text>'
        yield f'<line x1="{LEFT}" y1="{self.bottom}" x2="{WIDTH - RIGHT}" y2="{self.bottom}" stroke="{FAINT}"/>'
