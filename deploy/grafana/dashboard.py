"""Makes outfitter.json, the dashboard for Grafana, with Grafana's own SDK.

The rows have the console's order: what needs a person, who waits and why, the fleet, how long a grant takes, and how
the managers are. Metrics of managers do not name cluster and host, so each query takes these from `outfitter_info`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as values
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

FILE = Path(__file__).with_name("outfitter.json")

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
MANAGERS = 'outfitter_info{cluster=~"$cluster", host=~"$host"}'
APIS = 'outfitter_api_info{cluster=~"$cluster"}'
RESOURCE = 'resource=~"$resource"'
PLACE = "{{host}} {{instance}}"
"""A manager in a legend. In cluster scope its host is empty."""

IN_VAIN = "infeasible|not-reported|driver-failed"


def managers(vector: str) -> str:
    """A vector of the chosen managers only, with their cluster and host."""
    return f"{vector} * on (job, instance) group_left (cluster, host) {MANAGERS}"


def rate(metric: str, matchers: str = "") -> str:
    """The rate of a managers' counter."""
    return managers(f"rate({metric}{{{matchers}}}[$__rate_interval])")


def quantiles(metric: str, by: str, matchers: str = "") -> Iterator[tuple[str, str]]:
    """Three quantiles of a histogram, each with its legend."""
    for quantile in (0.5, 0.95, 0.99):
        buckets = rate(f"{metric}_bucket", matchers)
        groups = ", ".join(filter(None, ("le", by)))
        legend = f"p{quantile * 100:g} {{{{{by}}}}}" if by else f"p{quantile * 100:g}"
        yield f"histogram_quantile({quantile}, sum by ({groups}) ({buckets}))", legend


def query(
    expression: str, legend: str = "", *, letter: str = "A", at_once: bool = False, form: str = "time_series"
) -> Any:
    """One query of a panel, which calls it by its letter. `at_once`: its newest values only."""
    built = prometheus.Dataquery().ref_id(letter).expr(expression).legend_format(legend).format(PromQueryFormat(form))
    return built.instant() if at_once else built.range()


def steps(*bounds: tuple[float | None, str]) -> Any:
    """Colours from values on."""
    mode = model.ThresholdsMode.ABSOLUTE
    return dashboards.ThresholdsConfig().mode(mode).steps([model.Threshold(value, color) for value, color in bounds])


def number(title: str, about: str, expression: str, color: str = "red") -> Any:
    """A number that should be zero, and has this colour if it is not."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(3)
        .height(4)
        .decimals(0)
        .thresholds(steps((None, "green"), (1, color)))
        .color_mode(values.BigValueColorMode.BACKGROUND)
        .graph_mode(values.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(f"({expression}) or vector(0)", at_once=True))
    )


def curves(
    title: str, about: str, *queries: tuple[str, str], unit: str = "short", span: int = 8, stacked: bool = False
) -> Any:
    """Values over time. `queries`: an expression and a legend each."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(span)
        .height(8)
        .unit(unit)
        .min(0)
        .fill_opacity(20 if stacked else 0)
        .show_points(values.VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(values.TooltipDisplayMode.MULTI).sort(values.SortOrder.DESCENDING))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode(values.StackingMode.NORMAL).group("A"))
    for letter, (expression, legend) in zip("ABC", queries, strict=False):
        panel.with_target(query(expression, legend, letter=letter))
    return panel


def rows(title: str, about: str, expression: str, *columns: str, span: int = 12) -> Any:
    """A table of the newest values: these labels, then the value."""
    hidden = {"Time": True, "__name__": True, "job": True, "alertstate": True}
    order = {name: position for position, name in enumerate((*columns, "Value"))}
    return (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(span)
        .height(8)
        .show_header(True)
        .with_target(query(expression, at_once=True, form="table"))
        .with_transformation(
            model.DataTransformerConfig(
                id_val="organize", options={"excludeByName": hidden, "indexByName": order, "renameByName": {}}
            )
        )
    )


def needs_a_person() -> Iterator[Any]:
    firing = 'ALERTS{alertname=~"Outfitter.+", alertstate="firing"}'
    troubled = managers(f'outfitter_blocked_devices{{state!="cordoned", {RESOURCE}}}')
    vain = managers(f'outfitter_pending{{reason=~"{IN_VAIN}", {RESOURCE}}}')
    yield number(
        "Firing alerts", "Alerts of rules.yml, of all clusters. deploy/prometheus says what to do.", f"count({firing})"
    )
    yield number(
        "Managers that are silent",
        "Managers of all clusters that Prometheus cannot scrape. What they said last says nothing about now.",
        'count(up{job="outfitter"} == 0)',
    )
    yield number(
        "Managers that are not ready",
        "They run and answer nobody: /readyz says why.",
        f"sum({managers('(outfitter_ready == bool 0)')})",
    )
    yield number(
        "Devices in two allocations",
        "Must be 0. Else two workers may use one device.",
        f"sum({managers('outfitter_exclusivity_violations_total')})",
    )
    yield number(
        "Workers that wait in vain",
        "Waiting alone does not help them: they want too much, or their driver does not answer.",
        f"sum({vain})",
    )
    yield number(
        "Devices that nobody gets",
        "Unhealthy, of unknown health, held back, or used by strangers; held by workers or not.",
        f"sum({troubled})",
        "orange",
    )
    yield number(
        "Driver calls that failed, last hour",
        "Calls that failed or took too long.",
        f"round(sum({managers(f'increase(outfitter_driver_failures_total{{{RESOURCE}}}[1h])')}))",
        "orange",
    )
    yield number(
        "Refused messages, last hour",
        "Dead letters: somebody sends messages that nobody can obey.",
        f"round(sum({managers('increase(outfitter_dead_letters_total[1h])')}))",
        "orange",
    )
    yield rows(
        "Firing alerts", "Of all clusters.", firing, "severity", "alertname", "instance", "resource", "reason", span=24
    )


def who_waits() -> Iterator[Any]:
    pending = managers(f"outfitter_pending{{{RESOURCE}}}")
    yield curves(
        "Waiting workers, by reason",
        "busy: others have the devices. The other reasons need a person.",
        (f"sum by (reason) ({pending})", "{{reason}}"),
        span=12,
        stacked=True,
    )
    yield rows(
        "Where they wait, and why",
        "A worker that wants several resources counts for each of them.",
        f"sum by (cluster, host, instance, resource, reason) ({pending}) > 0",
        "cluster",
        "host",
        "instance",
        "resource",
        "reason",
    )


def fleet() -> Iterator[Any]:
    devices = managers(f"outfitter_devices{{{RESOURCE}}}")
    held = managers(f'outfitter_devices{{state="held", {RESOURCE}}}')
    yield curves(
        "Devices in use",
        "The share of each resource's devices that workers hold.",
        (f"sum by (resource) ({held}) / (sum by (resource) ({devices}) > 0)", "{{resource}}"),
        unit="percentunit",
    )
    yield curves(
        "Devices, by state", "", (f"sum by (resource, state) ({devices})", "{{resource}} {{state}}"), stacked=True
    )
    yield curves(
        "Grants and ends a second",
        "Ends are by reason. A lease that expires is a worker that fell silent.",
        (f"sum by (resource) ({rate('outfitter_grants_total', RESOURCE)})", "{{resource}} granted"),
        (f"sum by (reason) ({rate('outfitter_releases_total')}) > 0", "ended: {{reason}}"),
        unit="ops",
    )
    yield rows(
        "Devices of each host",
        "",
        f"sum by (cluster, host, instance, resource, state) ({devices}) > 0",
        "cluster",
        "host",
        "instance",
        "resource",
        "state",
        span=24,
    )


def latency() -> Iterator[Any]:
    yield curves(
        "From registration to grant",
        "From a registration's arrival on the bus to its committed grant. It includes the wait for devices.",
        *quantiles("outfitter_allocation_seconds", "resource", RESOURCE),
        unit="s",
    )
    yield (
        heatmap.Panel()
        .title("Grants, by how long they took")
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .scale_distribution(common.ScaleDistributionConfig().type(values.ScaleDistribution.LINEAR))
        .datasource(SOURCE)
        .span(8)
        .height(8)
        .with_target(
            query(f"sum by (le) ({rate('outfitter_allocation_seconds_bucket', RESOURCE)})", "{{le}}", form="heatmap")
        )
    )
    yield curves(
        "Failed registrations a second",
        "Workers that got nothing, by reason.",
        (f"sum by (reason) ({rate('outfitter_failures_total')}) > 0", "{{reason}}"),
        unit="ops",
    )


def health() -> Iterator[Any]:
    calls = rate("outfitter_driver_seconds_bucket", RESOURCE)
    yield curves(
        "Input lag",
        "Messages that are not decided yet, of all hosts of a partition.",
        (managers("outfitter_input_lag_records"), PLACE),
    )
    yield curves(
        "Oldest message without an answer",
        "Of those that are fetched.",
        (managers("outfitter_oldest_unanswered_seconds"), PLACE),
        unit="s",
    )
    yield curves(
        "Readiness",
        "1 while a manager answers registrations.",
        (managers("outfitter_ready"), PLACE),
    )
    yield curves(
        "Commits a second",
        "All but ok are errors.",
        (f"sum by (outcome) ({rate('outfitter_commits_total')})", "{{outcome}}"),
        unit="ops",
    )
    yield curves("Duration of commits", "", *quantiles("outfitter_commit_seconds", ""), unit="s")
    yield curves(
        "Messages that went wrong, a second",
        "Dead letters, unroutable messages, and fields that this version does not know.",
        (f"sum({rate('outfitter_dead_letters_total')})", "dead letters"),
        (f"sum by (reason) ({rate('outfitter_swept_total')}) > 0", "unroutable: {{reason}}"),
        (f"sum({rate('outfitter_unknown_fields_total')})", "with unknown fields"),
        unit="ops",
    )
    yield curves(
        "Driver calls a second that fail",
        "",
        (
            f"sum by (resource, call) ({rate('outfitter_driver_failures_total', RESOURCE)})",
            "{{resource}} {{call}}",
        ),
        unit="ops",
    )
    yield curves(
        "Duration of driver calls, p95",
        "",
        (
            f"histogram_quantile(0.95, sum by (le, resource, call) ({calls}))",
            "{{resource}} {{call}}",
        ),
        unit="s",
    )
    yield curves(
        "Who keeps a device from staying held",
        "Leases end silent workers. An owner that nobody watches leaves it to its lease.",
        (f"sum({managers('outfitter_leases')})", "leases"),
        (f"sum({managers('outfitter_watched_owners')})", "watched owners"),
        (f"sum by (reason) ({managers('outfitter_unwatched_owners')}) > 0", "unwatched: {{reason}}"),
    )
    yield curves(
        "Trust, loss and logs",
        "Refused log-ins, lost input, log lines that nobody took. In five minutes; all should be 0.",
        (f"sum({managers('increase(outfitter_authentication_failures_total[5m])')})", "refused log-ins"),
        (f"sum({managers('increase(outfitter_input_lost_total[5m])')})", "lost input"),
        (f"sum({managers('increase(outfitter_log_lines_dropped_total[5m])')})", "dropped log lines"),
    )
    yield curves("Memory", "", (managers("process_resident_memory_bytes"), PLACE), unit="bytes")
    yield curves(
        "Open files, share of the limit",
        "",
        (managers("process_open_fds / process_max_fds"), PLACE),
        unit="percentunit",
    )


def api() -> Iterator[Any]:
    def apis(vector: str) -> str:
        return f"{vector} * on (job, instance) group_left (cluster) {APIS}"

    yield curves(
        "How old its picture is",
        "The first is small while it keeps up. The second is long where nothing happens.",
        (f"(time() - {apis('outfitter_api_as_of_timestamp_seconds')})", "picture {{instance}}"),
        (f"(time() - {apis('outfitter_api_last_event_timestamp_seconds')})", "last event {{instance}}"),
        unit="s",
    )
    yield curves(
        "Requests a second",
        "",
        (f"sum by (status) ({apis('rate(outfitter_api_requests_total[$__rate_interval])')})", "{{status}}"),
        unit="ops",
    )
    yield curves(
        "Readers, and records behind",
        "Open event streams, and records of the ledger that the API has not read yet.",
        (apis("outfitter_api_streams"), "streams {{instance}}"),
        (apis("outfitter_api_behind_records"), "behind {{instance}}"),
    )


ROWS = (
    ("What needs a person", needs_a_person),
    ("Who waits, and why", who_waits),
    ("The fleet", fleet),
    ("From registration to grant", latency),
    ("Managers", health),
    ("The API", api),
)


def chosen(name: str, label: str, values_of: str) -> Any:
    """A variable with all values of a label, of which one may choose any number; at first all."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f"label_values({values_of})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def dashboard() -> model.Dashboard:
    """The dashboard."""
    built = (
        dashboards.Dashboard("Outfitter")
        .uid("outfitter")
        .description(
            "What needs a person, who waits and why, the fleet, latency, and the managers. Made by dashboard.py."
        )
        .tags(["outfitter"])
        .timezone("browser")
        .time("now-6h", "now")
        .refresh("30s")
        .with_variable(dashboards.DatasourceVariable("datasource").label("Source").type("prometheus"))
        .with_variable(chosen("cluster", "Cluster", "outfitter_info, cluster"))
        .with_variable(chosen("host", "Host", 'outfitter_info{cluster=~"$cluster"}, host'))
        .with_variable(chosen("resource", "Resource", "outfitter_devices, resource"))
    )
    for title, panels in ROWS:
        built.with_row(dashboards.Row(title))
        for panel in panels():
            built.with_panel(panel)
    made = built.build()
    for number_of_panel, panel in enumerate(made.panels or (), start=1):
        panel.id_val = number_of_panel
    return made


def text() -> str:
    """The dashboard as it is in the file."""
    return f"{JSONEncoder(sort_keys=True, indent=2).encode(dashboard())}\n"


if __name__ == "__main__":
    FILE.write_text(text())
