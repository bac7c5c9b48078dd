"""What an examination found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check. A finding that is not ``ok`` fails the examination; ``advice`` says what to do."""

    name: str
    value: str
    ok: bool = True
    advice: str = ""

    def __str__(self) -> str:
        mark = "ok" if self.ok else "!!"
        return f"{mark}  {self.name:<14} {self.value}" + (f"\n    {'':<14} {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Examination:
    """All findings; ``str`` is a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def data(self) -> dict[str, object]:
        """The findings as plain data, for JSON."""
        findings = {f.name: {"value": f.value, "ok": f.ok, "advice": f.advice} for f in self.findings}
        return {"ok": self.ok, "findings": findings}

    def __str__(self) -> str:
        return "\n".join(map(str, self.findings))
