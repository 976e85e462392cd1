"""The report of a campaign, whole or partial: Markdown and one self-contained page of HTML.

Every figure in both is resolved from a reference into the record (`flows.report_sources`), and carries it: in the
page as `data-ref`, in the Markdown in its list of sources. `verify_report` resolves them all again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from a3r.errors import NotFound, UsageError
from a3r.store import Reader
from flows.report_evidence import gather
from flows.report_sources import Number, Sources, Style
from flows.report_views import Evidence

_TEMPLATES = Path(__file__).with_name("templates")
_VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})
_QUOTED = frozenset({"style", "script", "svg", "code", "pre", "title"})


@dataclass(frozen=True, slots=True)
class ReportPaths:
    """Where a report was written."""

    markdown: Path
    html: Path


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A figure of a report that the record does not bear out."""

    ref: str
    """Its reference; empty for a figure that has none."""
    shown: str
    recorded: str
    """What the record gives now, or why it gives nothing."""


def write_report(
    reader: Reader, campaign_id: str, folder: Path, *, links: Mapping[str, str] | None = None
) -> ReportPaths:
    """Write `report.md` and `report.html` of a campaign as it stands now. Raises NotFound."""
    evidence = gather(Sources(reader, campaign_id))
    pages = {name: page for name, page in (links or {}).items() if name != "report"}
    paths = ReportPaths(markdown=folder / "report.md", html=folder / "report.html")
    folder.mkdir(parents=True, exist_ok=True)
    _replace(paths.html, _html(evidence, pages))
    _replace(paths.markdown, _markdown(evidence, pages))
    return paths


def _replace(path: Path, text: str) -> None:
    """Write all of a file or none of it: a report may be read while it is written again."""
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _environment(*, autoescape: bool) -> Environment:
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _html(evidence: Evidence, links: Mapping[str, str]) -> str:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"cite": _cited, "say": _said}
    return environment.get_template("report.html.j2").render(_variables(evidence, links))


def _cited(number: Number) -> Markup:
    """A figure as an element that carries its reference and its exact value."""
    return Markup('<data class="{}" value="{}" data-ref="{}" data-style="{}" title="{}">{}</data>').format(
        "word" if isinstance(number.value, str) else "number",
        number.value if isinstance(number.value, str) else repr(float(number.value)),
        number.ref,
        number.style.value,
        f"{number.label} [{number.ref}]",
        number.text,
    )


def _said(sentence: tuple[str | Number, ...]) -> Markup:
    return Markup("").join(_cited(part) if isinstance(part, Number) else escape(part) for part in sentence)


def _markdown(evidence: Evidence, links: Mapping[str, str]) -> str:
    used: dict[str, Number] = {}

    def cite(number: Number) -> str:
        if not isinstance(number.value, str):
            used.setdefault(number.ref, number)
        return " ".join(number.text.replace("|", "\\|").split())

    def say(sentence: tuple[str | Number, ...]) -> str:
        return "".join(cite(part) if isinstance(part, Number) else part for part in sentence)

    environment = _environment(autoescape=False)
    environment.filters |= {"cite": cite, "say": say}
    body = environment.get_template("report.md.j2").render(_variables(evidence, links))
    sources = [f"| {number.label} | {number.text} | `{number.ref}` |" for number in used.values()]
    text = "\n".join([body.rstrip(), "", "## Sources", "", "| what | shown | reference |", "|---|---|---|", *sources])
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _variables(evidence: Evidence, links: Mapping[str, str]) -> dict[str, object]:
    campaign = evidence.sources.campaign

    def quoted(ref: str, label: str, style: Style = Style.TEXT) -> Number:
        return evidence.sources.cite(ref, label=label, style=style)

    return {
        "evidence": evidence,
        "campaign": campaign,
        "links": links,
        "question": quoted("plan:question", "question"),
        "state": quoted(f"record:{campaign.id}/state", "state of the campaign"),
        "reason": quoted(f"record:{campaign.id}/reason", "why") if campaign.reason else None,
        "created_at": quoted(f"record:{campaign.id}/created_at", "begun", Style.TIME),
        "hidden_sha256": quoted(f"record:{campaign.id}/hidden_sha256", "hash of the hidden tasks")
        if campaign.hidden_sha256
        else None,
    }


def verify_report(reader: Reader, path: Path) -> list[Mismatch]:
    """Resolve every figure of a report's HTML page again and name those that differ, and digits without a reference.

    Raises UsageError for a page that names no campaign, NotFound when the record has no such campaign.
    """
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    if not page.campaign_id:
        raise UsageError(f"{path} is no report", next_step="give the path of a report.html")
    sources = Sources(reader, page.campaign_id)
    wrong = [mismatch for cited in page.cited if (mismatch := _check(sources, cited)) is not None]
    return wrong + [Mismatch("", text, "a figure without a reference") for text in page.uncited]


@dataclass
class _Cited:
    ref: str
    style: Style
    value: str
    shown: str = ""


def _check(sources: Sources, cited: _Cited) -> Mismatch | None:
    try:
        value = sources.value(cited.ref)
    except (NotFound, UsageError) as error:
        return Mismatch(cited.ref, cited.shown, error.what)
    exact = value if isinstance(value, str) else repr(float(value))
    text = cited.style.write(value)
    if (exact, text.split()) == (cited.value, cited.shown.split()):
        return None
    return Mismatch(cited.ref, cited.shown, text if text.split() != cited.shown.split() else exact)


@dataclass
class _Page(HTMLParser):
    """Collects a page's cited figures, and texts with digits that are neither cited nor quoted."""

    campaign_id: str = ""
    cited: list[_Cited] = field(default_factory=list)
    uncited: list[str] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag not in _VOID:
            self._open.append(tag)
        if "data-campaign" in given:
            self.campaign_id = given["data-campaign"]
        if tag == "data":
            self.cited.append(_Cited(given["data-ref"], Style(given["data-style"]), given["value"]))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            continue

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "data":
            self.cited[-1].shown += data
        elif re.search(r"\d", data) and not _QUOTED.intersection(self._open):
            self.uncited.append(" ".join(data.split()))
